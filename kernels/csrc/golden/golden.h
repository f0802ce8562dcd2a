// Golden vectors: fixed inputs run through every op; their output bytes identify the arithmetic.
//
// arith_id hashes the records in their order, so a record is never moved or renamed. A part that comes later
// changes no bit of a model without it, so its records are in no arith_id: golden_later_kind makes those of a
// kind of weights, the functions behind it others, and each part has a hash of its own.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "common/pool.h"
#include "common/types.h"
#include "common/types.h"

namespace batchengine {

constexpr Kind LATER_KINDS[] = {Kind::iq4_xs, Kind::q3_k, Kind::q2_k};
constexpr Kind CODEBOOKS[] = {Kind::iq3_xxs, Kind::iq3_s, Kind::iq2_xxs, Kind::iq2_xs,
                              Kind::iq2_s,   Kind::iq1_s, Kind::iq1_m};  // later, too, in one part

struct Golden {
    void add(const std::string& name, const void* bytes, size_t count) {
        records.emplace_back(name, std::string(static_cast<const char*>(bytes), count));
    }
    // The first rows, one after the other.
    void add(const std::string& name, const Rows& rows, size_t tokens) {
        std::string bytes;
        for (size_t t = 0; t < tokens; t++)
            bytes.append(reinterpret_cast<const char*>(rows.row(t)), rows.width * sizeof(float));
        records.emplace_back(name, bytes);
    }
    std::vector<std::pair<std::string, std::string>> records;  // name, output bytes
};

// SplitMix64: the same test inputs on every platform, in integers only.
class GoldenSource {
  public:
    explicit GoldenSource(uint64_t seed) : state_(seed) {}
    uint64_t next() {
        uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        return z ^ (z >> 31);
    }
    // Uniform in [-1, 1), exact.
    float unit() { return static_cast<float>(static_cast<int32_t>(next() >> 40) - (1 << 23)) * 0x1p-23f; }

  private:
    uint64_t state_;
};

// The bytes of a legal tensor of a GGUF file: every fp16 scale finite and small.
std::vector<uint8_t> random_tensor(Kind kind, size_t rows, size_t cols, GoldenSource& source);

void golden_attention(Pool& pool, Golden& golden);  // norm, rope, kv8, attention
void golden_linear(Pool& pool, Golden& golden);     // quantisation and the linear kernels
void golden_later_kind(Pool& pool, Kind kind, Golden& golden);  // one of LATER_KINDS
void golden_codebooks(Pool& pool, Golden& golden);  // CODEBOOKS
void golden_sample(Pool& pool, Golden& golden);     // sampling
void golden_experts(Pool& pool, Golden& golden);    // mixtures of experts
void golden_recurrent(Pool& pool, Golden& golden);  // gated delta networks and gates
void golden_gating(Pool& pool, Golden& golden);     // choices of experts by other functions than softmax
void golden_choices(Pool& pool, Golden& golden);  // softmax over all experts, and groups of experts
void golden_biased_softmax(Pool& pool, Golden& golden);  // a softmax over all with a bias of the choice
void golden_heads(Pool& pool, Golden& golden);  // rule 16
void golden_many_tokens(Golden& golden);  // linear kernels that some levels use for many token groups
void golden_wide_heads(Pool& pool, Golden& golden);  // attention with heads of more than 256 dims
void golden_values(Pool& pool, Golden& golden);  // rule 13
void golden_limits(Pool& pool, Golden& golden);  // silu within a limit, gates of whole heads
void golden_branches(Pool& pool, Golden& golden);  // feed-forward parts without a gate, branches times a factor
void golden_mamba2(Pool& pool, Golden& golden);  // rule 14
void golden_short_conv(Pool& pool, Golden& golden);  // rule 15

}  // namespace batchengine
