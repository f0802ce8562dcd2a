// Gated delta networks, avx512 unit: see delta_body.h.
#include "recurrent/delta_body.h"

namespace batchengine {
extern const DeltaKernels delta_avx512 = {convolve, recur};
}
