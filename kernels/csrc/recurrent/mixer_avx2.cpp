// Recurrent mixers, avx2 unit: see mixer_body.h.
#include "recurrent/mixer_body.h"

namespace batchengine {
extern const MixerKernels mixer_avx2 = {convolve, recur_delta, recur_mamba2, convolve_gated};
}
