// See dispatch.h.
#include "common/dispatch.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#if defined(BATCHENGINE_X86)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(BATCHENGINE_ARM)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace batchengine {
namespace {

std::atomic<int> current{0};

#if defined(BATCHENGINE_X86)
// Whether the processor multiplies tiles and the kernel lets this process use them, which it does once it is
// asked, for all threads.
bool tiles_permitted() {
#if defined(BATCHENGINE_EMULATE_AMX)
    return true;
#else
    unsigned a, b, c, d;
    constexpr unsigned TILE = 1u << 24, INT8 = 1u << 25;  // of leaf 7, EDX
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & TILE) == 0 || (d & INT8) == 0) return false;
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // of asm/prctl.h
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#endif
}
#endif

bool supported(Level candidate) {
#if defined(BATCHENGINE_X86)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
    switch (candidate) {
        case Level::scalar: return true;
        case Level::avx2: return avx2;
        case Level::avx512: return avx512;
        case Level::amx: {
            static const bool permitted = avx512 && tiles_permitted();
            return permitted;
        }
        default: return false;
    }
#elif defined(BATCHENGINE_ARM)
    const bool dotprod = getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
    const bool i8mm = getauxval(AT_HWCAP2) & HWCAP2_I8MM;
    return candidate == Level::scalar || (candidate == Level::neon_dotprod && dotprod) ||
           (candidate == Level::neon_i8mm && dotprod && i8mm);
#else
    return candidate == Level::scalar;
#endif
}

}  // namespace

const char* level_name(Level level) {
    static const char* const names[LEVEL_COUNT] = {"scalar",   "avx2",         "avx512-vnni",
                                                    "amx-int8", "neon-dotprod", "neon-i8mm"};
    return names[static_cast<int>(level)];
}

std::vector<Level> levels_supported() {
    std::vector<Level> found;
    for (int i = 0; i < LEVEL_COUNT; ++i)
        if (supported(static_cast<Level>(i))) found.push_back(static_cast<Level>(i));
    return found;
}

Level level() { return static_cast<Level>(current.load(std::memory_order_relaxed)); }

Level vector_level() { return level() == Level::amx ? Level::avx512 : level(); }

void set_level(const std::string& name) {
    for (int i = 0; i < LEVEL_COUNT; ++i) {
        const Level candidate = static_cast<Level>(i);
        if (name != level_name(candidate) || !supported(candidate)) continue;
        current.store(i);
        return;
    }
    std::string choices;
    for (const Level candidate : levels_supported())
        choices += std::string(choices.empty() ? "" : ", ") + level_name(candidate);
    throw std::invalid_argument("instruction set '" + name + "' is unknown or not supported: this " +
                                "machine lacks it or does not permit it; it supports: " + choices);
}

void choose_level_from_environment() {
    const char* forced = std::getenv("BATCHENGINE_ISA");
    if (forced && *forced) {
        try {
            set_level(forced);
        } catch (const std::invalid_argument& error) {
            throw std::invalid_argument(std::string("BATCHENGINE_ISA: ") + error.what());
        }
        return;
    }
    current.store(static_cast<int>(levels_supported().back()));
}

}  // namespace batchengine
