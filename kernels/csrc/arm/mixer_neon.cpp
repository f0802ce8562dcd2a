// Recurrent mixers, unit of both NEON levels: see mixer_body.h.
#include "recurrent/mixer_body.h"

namespace batchengine {
extern const MixerKernels mixer_neon = {convolve, recur_delta, recur_mamba2, convolve_gated};
}
