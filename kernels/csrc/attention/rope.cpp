// See rope.h. The series below are plain Taylor polynomials on reduced arguments: their truncation
// error lies under 2^-54, so the result is good to an ulp or two of binary64, far below the
// binary32 rounding that follows.
#include "attention/rope.h"

#include <cmath>

#include "common/pool.h"
#include "common/xxh3.h"

namespace batchengine {
namespace {

constexpr double ROUND_MAGIC_64 = 0x1.8p52;  // adding it rounds to an integer, ties to even
constexpr double LN2_HIGH = 0x1.62e42fefa39efp-1, LN2_LOW = 0x1.abc9e3b39803fp-56;
constexpr double HALF_PI_HIGH = 0x1.921fb54442d18p0, HALF_PI_LOW = 0x1.1a62633145c07p-54;

double horner(double x, const double* coefficients, int count) {
    double sum = coefficients[0];
    for (int i = 1; i < count; i++) sum = std::fma(sum, x, coefficients[i]);
    return sum;
}

double power_of_two(int64_t n) {
    const uint64_t bits = static_cast<uint64_t>(n + 1023) << 52;
    double x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// e^x for |x| < 700.
double rope_exp(double x) {
    static const double series[] = {1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0,
                                    1.0 / 3628800.0,    1.0 / 362880.0,    1.0 / 40320.0,
                                    1.0 / 5040.0,       1.0 / 720.0,       1.0 / 120.0,
                                    1.0 / 24.0,         1.0 / 6.0,         0.5,
                                    1.0,                1.0};
    const double n = (x * 0x1.71547652b82fep0 + ROUND_MAGIC_64) - ROUND_MAGIC_64;
    const double r = std::fma(-n, LN2_LOW, std::fma(-n, LN2_HIGH, x));
    return horner(r, series, 14) * power_of_two(static_cast<int64_t>(n));
}

// ln x for normal x > 0, as 2 artanh((m-1)/(m+1)) + e ln 2 with m in [sqrt(1/2), sqrt(2)).
double rope_log(double x) {
    static const double series[] = {1.0 / 23, 1.0 / 21, 1.0 / 19, 1.0 / 17, 1.0 / 15, 1.0 / 13,
                                    1.0 / 11, 1.0 / 9,  1.0 / 7,  1.0 / 5,  1.0 / 3};
    uint64_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint64_t root_half = 0x3FE6A09E667F3BCDu;
    const int64_t e = static_cast<int64_t>(bits - root_half) >> 52;
    const uint64_t mantissa_bits = bits - (static_cast<uint64_t>(e) << 52);
    double m;
    std::memcpy(&m, &mantissa_bits, sizeof m);
    const double z = (m - 1.0) / (m + 1.0);
    const double z2 = z * z;
    const double tail = 2.0 * z * z2 * horner(z2, series, 11);
    const double n = static_cast<double>(e);
    return std::fma(n, LN2_HIGH, 2.0 * z + std::fma(n, LN2_LOW, tail));
}

// Sine and cosine, |x| < 2^30: x = n pi/2 + r with pi/2 in two parts, then the series of r.
void rope_sincos(double x, double* sine, double* cosine) {
    static const double sines[] = {1.0 / 355687428096000.0, -1.0 / 1307674368000.0,
                                   1.0 / 6227020800.0,      -1.0 / 39916800.0,
                                   1.0 / 362880.0,          -1.0 / 5040.0,
                                   1.0 / 120.0,             -1.0 / 6.0};
    static const double cosines[] = {-1.0 / 6402373705728000.0, 1.0 / 20922789888000.0,
                                     -1.0 / 87178291200.0,      1.0 / 479001600.0,
                                     -1.0 / 3628800.0,          1.0 / 40320.0,
                                     -1.0 / 720.0,              1.0 / 24.0,
                                     -0.5,                      1.0};
    const double n = (x * 0x1.45f306dc9c883p-1 + ROUND_MAGIC_64) - ROUND_MAGIC_64;
    const double r = std::fma(-n, HALF_PI_LOW, std::fma(-n, HALF_PI_HIGH, x));
    const double r2 = r * r;
    const double s = std::fma(r * r2, horner(r2, sines, 8), r);
    const double c = horner(r2, cosines, 10);
    switch (static_cast<int64_t>(n) & 3) {
        case 0: *sine = s, *cosine = c; break;
        case 1: *sine = c, *cosine = -s; break;
        case 2: *sine = -s, *cosine = -c; break;
        default: *sine = -c, *cosine = s; break;
    }
}

}  // namespace

RopeTable::RopeTable(bool neox_, size_t head_dim_, size_t n_rot, double base, const Vector* factors,
                     double position_scale, double attn_factor, double query_log, size_t query_span)
    : neox(neox_), head_dim(head_dim_), half(n_rot / 2), attn_factor_(attn_factor),
      query_log_(query_log), query_span_(query_span),
      chunks_(new std::atomic<const float*>[POSITIONS_MAX / CHUNK]()) {
    if (n_rot == 0 || n_rot % 2 != 0 || n_rot > head_dim)
        throw std::invalid_argument("RopeTable: n_rot must be even, positive and at most head_dim");
    if (!(base > 0.0) || !std::isnormal(base) || !std::isfinite(position_scale) ||
        !std::isfinite(attn_factor))
        throw std::invalid_argument("RopeTable: base, position_scale or attn_factor is unusable");
    if (!(query_log >= 0.0 && query_log <= 1e3) || query_span == 0)
        throw std::invalid_argument("RopeTable: query_log or query_span is unusable");
    if (factors && factors->size != half)
        throw std::invalid_argument("RopeTable: factors must have n_rot/2 values");
    const FloatEnvironment environment;
    const double log_base = rope_log(base);
    for (size_t i = 0; i < half; i++) {
        const double exponent = static_cast<double>(2 * i) / static_cast<double>(n_rot);
        double frequency = rope_exp(-exponent * log_base);
        if (factors) frequency = frequency / static_cast<double>(factors->data[i]);
        frequency_.push_back(frequency * position_scale);
        // |angle| stays below 2^30 for every legal position, where the reduction is good.
        if (!(std::fabs(frequency_.back()) <= 256.0))
            throw std::invalid_argument("RopeTable: a frequency is not a number or above 256");
    }
}

RopeTable::~RopeTable() = default;

void RopeTable::fill(size_t chunk, float* out) const {
    for (size_t p = 0; p < CHUNK; p++, out += 2 * half) {
        const double position = static_cast<double>(chunk * CHUNK + p);
        for (size_t i = 0; i < half; i++) {
            double sine, cosine;
            rope_sincos(position * frequency_[i], &sine, &cosine);
            out[i] = static_cast<float>(cosine * attn_factor_);
            out[half + i] = static_cast<float>(sine * attn_factor_);
        }
    }
    for (size_t p = 0; p < CHUNK; p++) {
        const auto spans = static_cast<double>((chunk * CHUNK + p) / query_span_);
        out[p] = static_cast<float>(1.0 + query_log_ * rope_log(1.0 + spans));
    }
}

void RopeTable::cover(size_t first, size_t end) {
    if (end > POSITIONS_MAX)
        throw std::invalid_argument("RopeTable: position " + std::to_string(end - 1) +
                                    " lies beyond the table's limit of 4194304");
    for (size_t chunk = first / CHUNK; chunk * CHUNK < end; chunk++) {
        if (chunks_[chunk].load(std::memory_order_acquire)) continue;
        const std::lock_guard<std::mutex> lock(mutex_);
        if (chunks_[chunk].load(std::memory_order_relaxed)) continue;
        const FloatEnvironment environment;
        Buffer<float> values(CHUNK * (2 * half + 1));
        fill(chunk, values.data());
        owned_.push_back(std::move(values));
        chunks_[chunk].store(owned_.back().data(), std::memory_order_release);
    }
}

std::string RopeTable::digest() {
    cover(0, CHUNK);
    const uint64_t shape[3] = {neox, head_dim, half};
    uint64_t hash = xxh3_64(shape, sizeof shape, 0);
    hash = xxh3_64(frequency_.data(), frequency_.size() * sizeof(double), hash);
    hash = xxh3_64(cosines(0), CHUNK * 2 * half * sizeof(float), hash);
    if (scales_queries()) {
        const double scaling[2] = {query_log_, static_cast<double>(query_span_)};
        hash = xxh3_64(scaling, sizeof scaling, hash);
    }
    char text[17];
    static const char digits[] = "0123456789abcdef";
    for (int i = 0; i < 16; i++) text[i] = digits[(hash >> (60 - 4 * i)) & 15];
    text[16] = 0;
    return text;
}

}  // namespace batchengine
