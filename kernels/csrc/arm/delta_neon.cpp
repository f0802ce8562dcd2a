// Gated delta networks, unit of both NEON levels: see delta_body.h.
#include "recurrent/delta_body.h"

namespace batchengine {
extern const DeltaKernels delta_neon = {convolve, recur};
}
