// The instruction set of the kernels: chosen once at start, forced by BATCHENGINE_ISA or a test.
//
// Every level gives the same bits. A kernel family keeps one table of function pointers per level
// and indexes it with level(). To add AMX: append Level::amx, give it a name and a check in
// dispatch.cpp, and let each family's table point to its AVX-512 functions until it has tile ones
// (the 16-row tiles and 16-token panels already are the operands of TDPBSSD/TDPBUSD).
#pragma once

#include <string>
#include <vector>

namespace batchengine {

enum class Level : int { scalar, avx2, avx512, neon_dotprod, neon_i8mm };
constexpr int LEVEL_COUNT = 5;

const char* level_name(Level level);          // "scalar", "avx2", "avx512-vnni", "neon-dotprod", ...
std::vector<Level> levels_supported();        // in rising order, scalar first
Level level();                                // the one in use
void set_level(const std::string& name);      // throws std::invalid_argument with the choices
void choose_level_from_environment();         // at module load; throws like set_level

}  // namespace batchengine
