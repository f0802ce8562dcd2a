// Gated delta networks, avx2 unit: see delta_body.h.
#include "recurrent/delta_body.h"

namespace batchengine {
extern const DeltaKernels delta_avx2 = {convolve, recur};
}
