// Row operations, avx512 unit: see rowops_body.h.
#include "rows/rowops_body.h"

namespace batchengine {
extern const RowOps rowops_avx512 = ROWOPS_TABLE;
}
