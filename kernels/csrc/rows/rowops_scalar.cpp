// Row operations, scalar unit: see rowops_body.h.
#include "rows/rowops_body.h"

namespace batchengine {
extern const RowOps rowops_scalar = ROWOPS_TABLE;
}
