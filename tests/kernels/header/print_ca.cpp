// Prints "NAME HASH" for the functions of ca.h: the hash of what each returns for many inputs, every
// NaN counted as one. Two builds that print the same compute the same.
#include "common/ca.h"
#include "experts/choice.h"

#include <cinttypes>
#include <cstdio>
#include <iterator>
#include <type_traits>

namespace {

constexpr int MANY = 100000;

class Random {
  public:
    uint64_t next() {
        uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        return z ^ (z >> 31);
    }
    int below(int n) { return static_cast<int>(next() % static_cast<uint64_t>(n)); }
    // In [low, high).
    float between(float low, float high) {
        return low + (high - low) * static_cast<float>(next() >> 40) * 0x1p-24f;
    }
    // Any bits; one of sixteen is a border.
    float any() {
        static const uint32_t borders[] = {
            0x00000000, 0x80000000, 0x00000001, 0x007FFFFF, 0x00800000, 0x12800000, 0x127FFFFF,
            0x3F800000, 0xBF800000, 0x477FF000, 0x477FEFFF, 0x33000000, 0x33000001, 0x6F800000,
            0x6F7FFFFF, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001};
        const auto bits = static_cast<uint32_t>(next());
        return ca::float_of(below(16) ? bits : borders[below(std::size(borders))]);
    }
    // A row of one magnitude; one of 32 rows holds a value of any bits.
    void row(float* x, int n, int binades) {
        const float unit = ca::power_of_two(below(2 * binades + 1) - binades);
        for (int i = 0; i < n; i++) x[i] = between(-unit, unit);
        if (below(32) == 0) x[below(n)] = any();
    }

  private:
    uint64_t state_ = 0xCA2;
};

Random source;

class Line {
  public:
    explicit Line(const char* name) : name_(name) {}
    ~Line() { std::printf("%s %016" PRIx64 "\n", name_, hash_); }
    void add(float x) { add(static_cast<int64_t>(x == x ? ca::bits_of(x) : ca::NAN_BITS)); }
    void add(int32_t n) { add(static_cast<int64_t>(n)); }
    void add(bool yes) { add(static_cast<int64_t>(yes)); }
    void add(int64_t n) {
        for (int i = 0; i < 8; i++)
            hash_ = (hash_ ^ ((static_cast<uint64_t>(n) >> (8 * i)) & 255u)) * 0x100000001B3u;
    }
    template <class T>
    void add(const T* x, int n) {
        using Wide = std::conditional_t<sizeof(T) < 4, int32_t, T>;
        for (int i = 0; i < n; i++) add(static_cast<Wide>(x[i]));
    }

  private:
    const char* const name_;
    uint64_t hash_ = 0xCBF29CE484222325u;
};

// One line: MANY results of `value`, which draws its own inputs.
template <class Value>
void print(const char* name, Value&& value) {
    Line line(name);
    for (int i = 0; i < MANY; i++) line.add(value());
}

void primitives() {
    print("add_rn", [] { return ca::add_rn(source.any(), source.between(-8, 8)); });
    print("sub_rn", [] { return ca::sub_rn(source.any(), source.any()); });
    print("mul_rn", [] { return ca::mul_rn(source.any(), source.any()); });
    print("div_rn", [] { return ca::div_rn(source.any(), source.any()); });
    print("sqrt_rn", [] { return ca::sqrt_rn(source.any()); });
    print("fma_rn", [] {
        const float a = source.between(-4, 4), b = source.between(-4, 4);
        return ca::fma_rn(a, b, source.below(4) ? -ca::mul_rn(a, b) : source.any());
    });
    print("float_rn",
          [] { return ca::float_rn(static_cast<int64_t>(source.next()) >> source.below(63)); });
    print("ceil_exact",
          [] { return ca::ceil_exact(source.below(2) ? source.between(-99, 99) : source.any()); });
    print("is_finite", [] { return ca::is_finite(source.any()); });
    print("power_of_two", [] { return ca::power_of_two(source.below(254) - 126); });
    print("round_to_int", [] { return ca::round_to_int(source.between(-0x1p22f, 0x1p22f) * 0.5f); });
    print("round_large", [] {
        return ca::round_large(source.between(0, 1) * ca::power_of_two(source.below(32)));
    });
    print("half_to_float", [] { return ca::half_to_float(static_cast<uint16_t>(source.next())); });
    print("bf16_to_float", [] { return ca::bf16_to_float(static_cast<uint16_t>(source.next())); });
    print("float_to_half", [] { return int32_t{ca::float_to_half(source.any())}; });
    print("float_to_half, in range", [] {
        const float unit = ca::power_of_two(source.below(46) - 28);
        return int32_t{ca::float_to_half(source.between(-1, 1) * unit)};
    });
}

void transcendental() {
    print("exp2c", [] { return ca::exp2c(source.between(-140, 127)); });
    print("exp2c, near 0", [] { return ca::exp2c(source.between(-2, 2)); });
    print("expc", [] { return ca::expc(source.below(2) ? source.between(-90, 90) : source.any()); });
    print("logc", [] {
        const auto above = static_cast<uint32_t>(source.next() % 0x7F000000u);
        return ca::logc(ca::float_of(0x00800000u + above));
    });
    print("sigmoid", [] { return ca::sigmoid(source.below(4) ? source.between(-95, 95) : source.any()); });
    print("tanhc", [] { return ca::tanhc(source.below(4) ? source.between(-2, 2) : source.any()); });
    print("capped", [] {
        const float cap = source.between(0.5f, 60);
        const float x = source.below(4) ? source.between(-90, 90) : source.any();
        return ca::capped(x, ca::div_rn(1.0f, cap), cap);
    });
    print("softplus",
          [] { return ca::softplus(source.below(4) ? source.between(-30, 30) : source.any()); });
    const char* const names[ca::ACTIVATIONS] = {"gated silu", "gated oai", "gated gelu", "gated limited"};
    for (int i = 0; i < ca::ACTIVATIONS; i++)
        print(names[i], [i] {
            const float gate = source.below(4) ? source.between(-70, 20) : source.any();
            const float up = source.below(4) ? source.between(-20, 20) : source.any();
            return ca::gated(static_cast<ca::Activation>(i), gate, up, source.between(0.01f, 12));
        });
    print("relu2", [] { return ca::relu2(source.below(4) ? source.between(-9, 9) : source.any()); });
}

void rows() {
    Line group("quantise_group"), query("quantise_query"), kv8("kv8_group");
    Line squares("sum_of_squares"), transformed("hadamard");
    for (int i = 0; i < MANY / 64; i++) {
        float x[128];
        int8_t q[128] = {};
        float scale[4] = {};
        uint16_t d;
        source.row(x, 128, 110);
        group.add(ca::quantise_group(x, q, scale));
        group.add(q, 32);
        group.add(scale, 1);
        query.add(ca::quantise_query(x, 128, source.between(0, 1), q, scale));
        query.add(q, 128);
        query.add(scale, 4);
        source.row(x, 128, 30);
        ca::kv8_group(x, 128, q, &d);
        kv8.add(q, 128);
        kv8.add(&d, 1);
        squares.add(ca::sum_of_squares(x, 1 + source.below(128)));
        const int head_dim = 32 * (1 + source.below(4)), v_first = 32 * source.below(3);
        const bool is_latent = source.below(2) != 0;
        ca::hadamard(x, is_latent ? ca::transform_width(head_dim, v_first) : ca::hadamard_width(head_dim));
        transformed.add(x, 128);
    }
}

void products_and_norms() {
    print("step", [] {
        const int32_t integer = source.below(1 << 24) - (1 << 23);
        const float scale = ca::half_to_float(static_cast<uint16_t>(source.next() & 0xFBFFu));
        const float unit = ca::power_of_two(source.below(180) - 90);
        return ca::step(source.between(-99, 99), integer, scale, unit * 1.25f);
    });
    print("step_of_power", [] {  // with sums that are subnormal
        const int32_t integer = source.below(97537) - 48768;
        const float power = ca::power_of_field(static_cast<uint32_t>(source.below(160)));
        const float scale = ca::power_of_two(source.below(186) - 97) * 1.25f;
        return ca::step_of_power(source.between(-99, 99) * power, integer, power, scale);
    });
    print("norm_factor",
          [] { return ca::norm_factor(source.between(0, 1e6f), 1 + source.below(9999), 1e-6f); });
    print("norm_value",
          [] { return ca::norm_value(source.any(), source.between(0, 9), source.between(-3, 3)); });
    print("rotate", [] {
        float x0 = source.between(-9, 9), x1 = source.between(-9, 9);
        ca::rotate(x0, x1, source.between(-1, 1), source.between(-1, 1));
        return source.below(2) ? x0 : x1;
    });
}

void attention() {
    Line softened("page_softmax"), folded("fold"), finished("finish");
    for (int i = 0; i < MANY / 256; i++) {
        float score[256], p[256], o[256], o_next[256];
        uint16_t scales[256];
        int32_t weight[256] = {};
        ca::PageSoftmax row{};
        const int n = 1 + source.below(256);
        source.row(score, n, 8);
        for (int t = 0; t < n; t++) scales[t] = static_cast<uint16_t>(source.next() % 0x7C00u);
        if (source.below(16) == 0) scales[source.below(n)] = ca::POISON_HALF;
        const bool finite = ca::page_softmax(score, scales, n, p, weight, row);
        softened.add(finite);
        if (finite) {
            softened.add(weight, n);
            softened.add(&row.m, 3);
        }
        source.row(o, 256, 20);
        source.row(o_next, 256, 20);
        const auto share = [] { return source.below(8) ? source.between(0, 300) : 0.0f; };
        float m = static_cast<float>(source.below(60)), l = share();
        ca::fold(m, l, o, static_cast<float>(source.below(60)), share(), o_next, 256);
        folded.add(o, 256);
        folded.add(m);
        folded.add(l);
        ca::finish(source.below(8) ? l : source.any(), o, 256, o_next);
        finished.add(o_next, 256);
    }
    print("sink_of", [] {
        const ca::Sink sink = ca::sink_of(source.below(4) ? source.between(-30, 30) : source.any());
        return source.below(2) ? sink.m : sink.l;
    });
    print("numerator", [] {
        return ca::numerator(static_cast<int32_t>(source.next()),
                             ca::power_of_two(source.below(200) - 90));
    });
}

void sampling() {
    print("penalised", [] {
        const float x = source.below(2) ? source.between(-20, 20) : source.any();
        return ca::penalised(x, 1 + source.below(99), source.between(0.5f, 2), source.between(-2, 2),
                             source.between(-2, 2));
    });
    print("weight_of", [] {
        return ca::weight_of(source.between(-30, 9), 9.0f, source.between(0.01f, 3));
    });
    print("integer_weight", [] {
        return ca::integer_weight(source.between(0, 1) * ca::power_of_two(-source.below(40)));
    });
    print("falling_key", [] {
        const float x = source.between(-9, 9);
        return int64_t{ca::falling_key(source.below(8) ? x : x * 0.0f)};
    });
    print("philox", [] {
        uint32_t out[4];
        const uint64_t seed = source.next(), position = source.next();
        ca::philox(seed, position, static_cast<uint32_t>(source.next()), out);
        return static_cast<int64_t>(uint64_t{out[0]} << 32 | out[1]) ^
               static_cast<int64_t>(uint64_t{out[2]} << 32 | out[3]);
    });
    print("share_of", [] {
        const auto total = static_cast<int64_t>(source.next() >> 2);
        return ca::share_of(total, static_cast<uint32_t>(source.next()));
    });
    print("fraction_of", [] { return int64_t{ca::fraction_of(source.between(0, 1))}; });
    print("log_of_sum", [] {
        const auto sum = static_cast<int64_t>(source.next() >> (2 + source.below(32)));
        return ca::log_of_sum(sum | (1 << 30));
    });
    print("log_probability", [] {
        return ca::log_probability(source.between(-30, 9), 9.0f, source.between(0, 12));
    });
}

void experts() {
    Line ids("select_experts, ids"), weights("select_experts, weights");
    for (int round = 0; round < MANY / 8; round++) {
        const ca::ExpertGroups groups = round % 3 ? ca::ExpertGroups{} : ca::ExpertGroups{4, 2};
        const int n = groups.n > 1 ? 4 * (2 + source.below(9)) : 1 + source.below(40);
        const int most = n * groups.kept / groups.n, used = 1 + source.below(most < 8 ? most : 8);
        float logit[40], key[40], weight[8], scales[40];
        int32_t id[8];
        const auto gating = static_cast<ca::Gating>(source.below(ca::GATINGS));
        for (int i = 0; i < n; i++) logit[i] = source.below(4) ? source.between(-9, 9) : 1.0f;
        if (round % 16 == 3) logit[source.below(n)] = source.any();
        const ca::SoftmaxOfAll all = ca::softmax_of_all(logit, n);
        for (int i = 0; i < n; i++) key[i] = ca::choice_key(gating, logit[i], source.between(-1, 1), all);
        for (int i = 0; i < n; i++) scales[i] = source.between(-2, 2);
        ca::select_experts(gating, logit, key, all, n, used, groups, source.between(0.5f, 2),
                           round % 2 ? scales : nullptr, id, weight);
        for (int i = 0; i < used; i++) ids.add(id[i]);
        weights.add(weight, used);
    }
    print("add_expert", [] {
        return ca::add_expert(source.between(-9, 9), source.between(0, 1), source.between(-9, 9));
    });
}

void recurrent_mixers() {
    Line dots("column_product");
    for (int round = 0; round < MANY / 256; round++) {
        float s[256], x[256];
        source.row(s, 256, 30);
        source.row(x, 256, 30);
        dots.add(ca::column_product(s, 1, x, ca::CHAIN * (1 + source.below(8))));
    }
    print("convolved", [] {
        float x[8], w[4];
        source.row(x, 8, 20);
        source.row(w, 4, 20);
        return ca::convolved(x, 2, w, 2 + source.below(3));
    });
    print("unit_factor", [] { return ca::unit_factor(source.between(0, 1e6f), 1e-6f); });
    print("state_decay", [] {
        const float alpha = source.below(4) ? source.between(-30, 30) : source.any();
        return ca::state_decay(alpha, source.between(-9, 9), source.between(-20, 0));
    });
    print("state_delta", [] {
        return ca::state_delta(source.any(), source.between(-9, 9), source.between(0, 1),
                               source.between(0, 1));
    });
    print("state_value", [] {
        return ca::state_value(source.any(), source.between(0, 1), source.between(-1, 1),
                               source.between(-9, 9));
    });
    print("state_scale", [] { return ca::state_scale(ca::CHAIN * (1 + source.below(8))); });
    print("gated_norm", [] {
        return ca::gated_norm(source.between(-9, 9), source.between(0, 9), source.between(-3, 3),
                              source.any());
    });
    print("gate_value", [] { return ca::gate_value(source.between(-9, 9), source.any()); });
    print("add_share", [] {
        return ca::add_share(source.any(), source.between(0, 1), source.between(-9, 9));
    });
    print("step_size", [] {
        const float dt = source.below(4) ? source.between(-30, 30) : source.any();
        return ca::step_size(dt, source.between(-9, 9));
    });
    print("gated_state", [] {
        return ca::gated_state(source.any(), source.between(-9, 9), source.between(-9, 9),
                               source.any());
    });
}

}  // namespace

int main() {
    primitives();
    transcendental();
    rows();
    products_and_norms();
    attention();
    sampling();
    experts();
    recurrent_mixers();
    return 0;
}
