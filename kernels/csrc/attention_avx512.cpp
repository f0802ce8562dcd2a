#include "attention_page.h"

namespace batchengine {
void page_partials_avx512(const PageView& page, int head_dim, const QueryRows& rows,
                      AttentionScratch& scratch, const Partials& out) {
    page_partials_scalar(page, head_dim, rows, scratch, out);
}
}  // namespace batchengine
