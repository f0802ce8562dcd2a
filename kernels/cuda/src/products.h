// What kernels of matrix products share: the columns that a block computes, and what follows a product.
#pragma once

#include "formats/activations.h"
#include "formats/blocks.h"

namespace gpu {

// What becomes of a product y.
enum class Then : int {
    store,  // out = y + bias
    add,    // out = out + (y + bias): the residual stream
    relu2,  // out = ca::relu2(y + bias)
    // out = ca::gated(gate, y + bias) of the activation of that name, in the order of ca::Activation
    gate_silu,
    gate_oai,
    gate_gelu,
    gate_limited,
};

// The gate's matrix, of the size of the other one, and its bias as in Target. Without a matrix, `out` holds
// the gate's product, with its bias.
struct Gate {
    In<uint8_t> matrix;
    In<float> bias;
};

struct Target {
    In<float> bias;  // or null; of a bank, a value for each row of it
    Out<float> out;
    int64_t stride;
    float limit;  // of Then::gate_limited
    int rows;
    int tokens;
    Then then;
};

// Of row `row` of the matrix, or of an expert. gate_y: the gate's product, if `gate` has a matrix.
GPU_FN void put(const Target& to, int expert, int token, int row, float y, const Gate& gate = {},
                float gate_y = 0.0f) {
    if (row >= to.rows) return;
    const int64_t of_bank = int64_t{expert} * to.rows + row;
    if (to.bias) y = ca::add_rn(y, to.bias[of_bank]);
    const int64_t at = token * to.stride + row;
    if (to.then == Then::add) y = ca::add_rn(to.out[at], y);
    if (to.then == Then::relu2) y = ca::relu2(y);
    if (to.then >= Then::gate_silu) {
        if (!gate.matrix) gate_y = to.out[at];
        if (gate.bias) gate_y = ca::add_rn(gate_y, gate.bias[of_bank]);
        // Of unrolled outputs the compiler would else make a copy for each activation: twice the code.
        const int activation = opaque(static_cast<int>(to.then) - static_cast<int>(Then::gate_silu));
        y = ca::gated(static_cast<ca::Activation>(activation), gate_y, y, to.limit);
    }
    to.out[at] = y;
}

// Pairs of a token and an expert that it has chosen, as experts.cu sorts them. Pair `slot` of a token has
// the number token * n_used + slot. The matrix of a product of pairs is a bank: those of all experts, of
// `rows` rows each. Without `portions`, the columns of a product are tokens, and there is one matrix.
struct Pairs {
    // Of a block: expert, first in `order`, count (0: there is none), and its number among those of the expert.
    In<Words4> portions;
    In<int32_t> order;  // numbers of pairs by expert, then token
    int each;           // so many pairs have one row of activations: those of a token, or 1
};

// The columns of a block, of which column c has the row `row(c)` of the output.
struct Columns {
    In<int32_t> order;  // of the first column; null: tokens
    int each;
    int first;
    int last;  // column; below 0: there is none
    int expert;

    GPU_FN int row(int column) const { return order ? int(order[column]) : first + column; }
    // The row of activations, counted from `base()`. Columns past the last compute what is not stored, from
    // the last one's.
    GPU_FN int held(int column) const {
        const int held = column < last ? column : last;
        return order ? order[held] / each : held;
    }
    GPU_FN int base() const { return order ? 0 : first; }
};

// The columns of this block, of up to `most`.
GPU_FN Columns columns_of(const Pairs& pairs, int tokens, int most) {
    if (!pairs.portions) return {{}, 1, block() * most, tokens - 1 - block() * most, 0};
    const Words4 portion = pairs.portions[block()];
    const int expert = static_cast<int>(portion.word[0]), first = static_cast<int>(portion.word[1]);
    return {pairs.order + first, pairs.each, first, static_cast<int>(portion.word[2]) - 1, expert};
}

// The same at the begin of a kernel. Calls `ask(expert)` in those blocks that ask for weights which others
// read too: of tokens, before the activations are there; of pairs, once the expert is known.
template <class Ask>
GPU_FN Columns begin_with(const Pairs& pairs, int tokens, int most, Ask ask) {
    launch_dependents();
    if (!pairs.portions && block() == 0) ask(0);
    dependency_wait();
    const Columns columns = columns_of(pairs, tokens, most);
    if (pairs.portions && columns.last >= 0 && pairs.portions[block()].word[3] == 0) ask(columns.expert);
    return columns;
}

}  // namespace gpu
