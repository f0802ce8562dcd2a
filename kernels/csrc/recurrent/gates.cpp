// Gates of the output of attention and of a shared expert; see mixers.h.
#include "quant/token_runs.h"
#include "recurrent/mixers.h"
#include "rows/rowops.h"

namespace batchengine {

void gate_rows(Pool& pool, const Rows& gate, size_t tokens, Rows& out) {
    const RowOps& ops = rowops();
    for_each_run(pool, tokens, out.width, [&](size_t token, size_t count) {
        for (size_t t = token; t < token + count; t++) ops.gate(gate.row(t), out.width, out.row(t));
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
