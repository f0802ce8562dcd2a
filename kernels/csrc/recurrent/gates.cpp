// Gates of the output of attention and of a shared expert; see mixers.h.
#include "quant/token_runs.h"
#include "recurrent/mixers.h"
#include "rows/rowops.h"

namespace batchengine {

void gate_rows(Pool& pool, const Rows& gate, size_t tokens, Rows& out) {
    const RowOps& ops = rowops();
    const size_t each = out.width / gate.width;
    for_each_run(pool, tokens, out.width, [&](size_t token, size_t count) {
        for (size_t t = token; t < token + count; t++) {
            float* y = out.row(t);
            if (each == 1) ops.gate(gate.row(t), out.width, y);
            for (size_t i = 0; each > 1 && i < gate.width; i++, y += each)
                ops.scale(y, each, ca::sigmoid(gate.row(t)[i]), y);
        }
    });
}

void gate_add(Pool& pool, const Rows& x, const Rows& gate, size_t tokens, Rows& out) {
    const RowOps& ops = rowops();
    for_each_run(pool, tokens, out.width, [&](size_t token, size_t count) {
        for (size_t t = token; t < token + count; t++)
            ops.add_share(x.row(t), out.width, ca::sigmoid(gate.row(t)[0]), out.row(t));
    });
}

}  // namespace batchengine
