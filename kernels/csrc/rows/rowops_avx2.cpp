// Row operations, avx2 unit: see rowops_body.h.
#include "rows/rowops_body.h"

namespace batchengine {
extern const RowOps rowops_avx2 = ROWOPS_TABLE;
}
