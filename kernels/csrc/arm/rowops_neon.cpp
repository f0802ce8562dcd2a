// Row operations, unit of both NEON levels: see rowops_body.h.
#include "rows/rowops_body.h"

namespace batchengine {
extern const RowOps rowops_neon = ROWOPS_TABLE;
}
