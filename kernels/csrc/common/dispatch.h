// The instruction set of the kernels: chosen once at start, forced by BATCHENGINE_ISA or a test.
//
// Every level gives the same bits. A kernel family keeps one table of function pointers per level
// and indexes it with level(), or with vector_level() where it has no unit on tiles.
#pragma once

#include <string>
#include <vector>

namespace batchengine {

enum class Level : int { scalar, avx2, avx512, amx, neon_dotprod, neon_i8mm };
constexpr int LEVEL_COUNT = 6;

const char* level_name(Level level);          // "scalar", "avx512-vnni", "amx-int8", ...
std::vector<Level> levels_supported();        // in rising order, scalar first
Level level();                                // the one in use
Level vector_level();                         // the same, with AVX-512 for AMX, which has it besides
void set_level(const std::string& name);      // throws std::invalid_argument with the choices
void choose_level_from_environment();         // at module load; throws like set_level

}  // namespace batchengine
