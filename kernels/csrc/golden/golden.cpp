// See golden.h.
#include "golden/golden.h"

namespace batchengine {

std::vector<std::pair<std::string, std::string>> golden_records(Pool& pool) {
    Golden golden;
    golden_attention(pool, golden);
    golden_linear(pool, golden);
    return std::move(golden.records);
}

}  // namespace batchengine
