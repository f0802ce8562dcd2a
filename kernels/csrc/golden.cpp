// See golden.h.
#include "golden.h"

#include <map>

namespace batchengine {
namespace {

std::map<std::string, GoldenHook>& hooks() {
    static std::map<std::string, GoldenHook> registered;
    return registered;
}

}  // namespace

void golden_register(const std::string& name, GoldenHook hook) { hooks()[name] = hook; }

std::vector<std::pair<std::string, std::string>> golden_records(Pool& pool) {
    Golden golden;
    for (const auto& [name, hook] : hooks()) hook(pool, golden);
    return std::move(golden.records);
}

}  // namespace batchengine
