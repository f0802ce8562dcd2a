// Rotary embedding table (CA-3 rule 4): cosines and sines per position, the same on every machine.
//
// Angles are computed in binary64 by the routines of rope.cpp, which use only IEEE add, mul, fma and
// division, never libm; they are rounded once to binary32. The table grows by 256 positions at a
// time and never moves, so readers need no lock.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/types.h"

namespace batchengine {

class RopeTable {
  public:
    static constexpr size_t CHUNK = 256;
    static constexpr size_t POSITIONS_MAX = size_t{1} << 22;

    // angle(p, i) = p * base^(-2i/n_rot) / factors[i] * position_scale, i < n_rot/2.
    // Cosines and sines are multiplied by attn_factor before they are rounded. Queries at p are scaled
    // by 1 + query_log * ln(1 + floor(p / query_span)).
    RopeTable(bool neox, size_t head_dim, size_t n_rot, double base, const Vector* factors,
              double position_scale, double attn_factor, double query_log = 0.0,
              size_t query_span = 1);
    ~RopeTable();
    RopeTable(const RopeTable&) = delete;
    RopeTable& operator=(const RopeTable&) = delete;

    // Makes positions [first, end) readable, the same in any floating-point environment. Thread-safe.
    void cover(size_t first, size_t end);
    // The n_rot/2 cosines of a covered position; its sines follow them.
    const float* cosines(size_t position) const {
        const float* chunk = chunks_[position / CHUNK].load(std::memory_order_acquire);
        return chunk + (position % CHUNK) * 2 * half;
    }
    // The scale of queries at a covered position.
    float query_scale(size_t position) const {
        const float* chunk = chunks_[position / CHUNK].load(std::memory_order_acquire);
        return chunk[CHUNK * 2 * half + position % CHUNK];
    }
    bool scales_queries() const { return query_log_ != 0.0; }
    // Hex hash of the parameters and of the table's first 256 positions.
    std::string digest();

    const bool neox;
    const size_t head_dim;
    const size_t half;  // n_rot / 2

  private:
    void fill(size_t chunk, float* out) const;

    std::vector<double> frequency_;
    const double attn_factor_;
    const double query_log_;
    const size_t query_span_;
    std::mutex mutex_;
    std::vector<Buffer<float>> owned_;
    std::unique_ptr<std::atomic<const float*>[]> chunks_;
};

}  // namespace batchengine
