// The emulator behind simt.h: allocations, the fibers of a block, its barriers, and the marks of accesses.
//
// One launch runs at a time, on the thread that calls simt_launch, one block after the other, in an order
// of blocks and threads that the caller chooses: a result that depends on it is a fault of the kernel.
#include "simt.h"

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <sys/mman.h>

#include "common/ca.h"

namespace simt {

Place here;

namespace {

constexpr size_t STACK_BYTES = size_t{1} << 17;
constexpr int WARP_BARRIER = -1;  // the kind of an exchange without words

struct Entry {
    int threads_max;
    size_t n_arguments;
    std::function<void(const uint64_t*)> call;
};
std::map<std::string, Entry>& kernels() {
    static std::map<std::string, Entry> table;
    return table;
}
std::map<uint64_t, std::unique_ptr<Allocation>>& allocations() {
    static std::map<uint64_t, std::unique_ptr<Allocation>> table;
    return table;
}

std::string kernel_name;
std::string last_error;
uint64_t n_runs = 0, n_launches = 0;
int32_t first_block[3] = {0, 0, 0};  // of the next launches; those before it do not run

// ---------------------------------------------------------------------------------------- fibers

// Saves the registers that a call preserves on the stack, stores the stack pointer at *from and goes on
// with the one of `to`.
extern "C" void simt_switch(void** from, void* to);
#if defined(__x86_64__)
asm(R"(
.text
.globl simt_switch
.type simt_switch, @function
simt_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size simt_switch, . - simt_switch
)");
constexpr size_t SAVED = 6;  // registers; the return address follows
#elif defined(__aarch64__)
asm(R"(
.text
.globl simt_switch
.type simt_switch, %function
simt_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp d8, d9, [sp, #80]
    stp d10, d11, [sp, #96]
    stp d12, d13, [sp, #112]
    stp d14, d15, [sp, #128]
    stp x29, x30, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp d8, d9, [sp, #80]
    ldp d10, d11, [sp, #96]
    ldp d12, d13, [sp, #112]
    ldp d14, d15, [sp, #128]
    ldp x29, x30, [sp, #144]
    add sp, sp, #160
    ret
.size simt_switch, . - simt_switch
)");
constexpr size_t SAVED = 19;  // words before the return address
#else
#error "simt.cpp knows no stack switch for this processor"
#endif

uint8_t* stacks() {
    static uint8_t* const memory = [] {
        void* const p = mmap(nullptr, STACK_BYTES * THREADS_MAX, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) throw std::bad_alloc();
        return static_cast<uint8_t*>(p);
    }();
    return memory;
}

enum class State { ready, at_barrier, in_exchange, done };

struct Thread {
    State state = State::ready;
    void* stack = nullptr;
    int line = 0;             // of the collective it waits in
    uint64_t generation = 0;  // of its warp's exchange when it began to wait
    uint32_t barriers = 0;
    bool has_waited = false;  // for the launches before
    std::vector<std::vector<std::function<void()>>> copies;  // committed groups, few
    std::vector<std::function<void()>> open;                 // the group that is not committed
};
struct Warp {
    Warp() {}  // words have no value before they are exchanged
    Words words[2][WARP];
    int arrived = 0;
    int kind = 0;
    int line = 0;
    uint64_t calls = 0;  // see calls_to_here
    uint64_t generation = 0;
    uint32_t barriers = 0;
};

struct Block {
    explicit Block(int n) : threads(n), warps(n / WARP) {}
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    int at_barrier = 0;
    int n_done = 0;
    int barrier_line = 0;
    uint64_t barrier_calls = 0;
    bool has_failed = false;
    std::string fault;
    const std::function<void()>* body = nullptr;
    void* scheduler = nullptr;
    int current = 0;
};
Block* block = nullptr;

void yield() {
    Thread& self = block->threads[block->current];
    simt_switch(&self.stack, block->scheduler);
}

// The calls by which this thread came to its collective: a number made of their return addresses.
// Frames are linked through the frame pointer (-fno-omit-frame-pointer), and the first one of a fiber has
// none before it.
__attribute__((noinline)) uint64_t calls_to_here() {
    uint64_t number = 0;
    const void* const* frame = static_cast<void**>(__builtin_frame_address(0));
    while ((frame = static_cast<const void* const*>(frame[0])))
        number = (number ^ reinterpret_cast<uint64_t>(frame[1])) * 0x9E3779B97F4A7C15u;
    return number;
}

void begin() {
    try {
        (*block->body)();
        Thread& self = block->threads[block->current];
        if (!self.open.empty() || !self.copies.empty())
            fail("ends before its copies have");
        if (!self.has_waited) fail("ends without a dependency_wait");
        if (block->at_barrier) fail("ends while others wait at a barrier");
    } catch (const Fault& fault) {
        block->has_failed = true;
        block->fault = fault.what();
    }
    block->threads[block->current].state = State::done;
    block->n_done++;
    yield();
}

void prepare_stack(Thread& thread, int index) {
    auto* const top = reinterpret_cast<uint64_t*>(stacks() + STACK_BYTES * (index + 1));
    // At the entry of a function the stack is 8 past a multiple of 16 on x86-64.
    uint64_t* at = top - 2;
    *at = reinterpret_cast<uint64_t>(&begin);
    at -= SAVED;
    std::fill(at, at + SAVED, 0);
    thread.stack = at;
}

void run_block(const std::function<void()>& body, int n_threads, const std::vector<int>& order) {
    Block now(n_threads);
    now.body = &body;
    block = &now;
    here.run = ++n_runs;
    for (int i = 0; i < n_threads; i++) prepare_stack(now.threads[i], i);
    while (now.n_done < n_threads && !now.has_failed) {
        bool has_moved = false;
        for (const int i : order) {
            Thread& thread = now.threads[i];
            Warp& warp = now.warps[i / WARP];
            if (thread.state == State::in_exchange && thread.generation != warp.generation)
                thread.state = State::ready;
            if (thread.state != State::ready) continue;
            has_moved = true;
            now.current = here.thread = i;
            here.barriers = thread.barriers;
            here.warp_barriers = warp.barriers;
            simt_switch(&now.scheduler, thread.stack);
            if (now.has_failed) break;
        }
        if (has_moved) continue;
        const auto stuck = std::find_if(now.threads.begin(), now.threads.end(),
                                        [](const Thread& t) { return t.state != State::done; });
        here.thread = static_cast<int>(stuck - now.threads.begin());
        now.has_failed = true;
        const bool is_barrier = stuck->state == State::at_barrier;
        now.fault = kernel_name + ", thread " + std::to_string(here.thread) + ": waits at line " +
                    std::to_string(stuck->line) +
                    (is_barrier ? " at a barrier that others do not reach"
                                : " for lanes that do not come");
    }
    block = nullptr;
    if (now.has_failed) throw Fault(now.fault);
}

// ----------------------------------------------------------------------------------------- marks

inline uint32_t thread_number() { return 1 + here.number * THREADS_MAX + here.thread; }

// Whether what made the mark happened before what this thread does now.
inline bool is_before(const Mark& mark, uint32_t self) {
    if (mark.thread == 0 || (mark.thread == self && mark.scope == Scope::thread)) return true;
    if (mark.scope == Scope::grid || (mark.thread - 1) / THREADS_MAX != (self - 1) / THREADS_MAX)
        return false;
    if (mark.barriers < here.barriers) return true;
    return mark.scope != Scope::block && (mark.thread - 1) / WARP == (self - 1) / WARP &&
           mark.warp_barriers < here.warp_barriers;
}

[[noreturn]] void fail_by_race(const Mark& mark) {
    fail("races with thread " + std::to_string((mark.thread - 1) % THREADS_MAX) +
         " of block number " + std::to_string((mark.thread - 1) / THREADS_MAX));
}

// Fails when the access races with an earlier one of another kind, or with an earlier write.
inline void note(Cell& cell, Access access) {
    const uint32_t self = thread_number();
    for (const Access other : {Access::read, Access::write, Access::atomic}) {
        const Mark& mark = cell.marks[static_cast<int>(other)];
        if ((other != access || access == Access::write) && !is_before(mark, self))
            fail_by_race(mark);
    }
    Mark& mark = cell.marks[static_cast<int>(access)];
    Scope scope = Scope::thread;
    if (!is_before(mark, self)) {
        const uint32_t last = mark.thread - 1, now = self - 1;
        scope = last / THREADS_MAX != now / THREADS_MAX ? Scope::grid
                : last / WARP != now / WARP             ? Scope::block
                : last != now                           ? Scope::warp
                                                        : Scope::thread;
        scope = std::max(scope, mark.scope);
    }
    mark = {self, here.barriers, here.warp_barriers, scope};
}

// Whether this is memory of a block.
bool is_shared(const Allocation* at) { return at && at->launch == 0 && !at->words.empty(); }

// The allocation of an access, which lies in it: that of a pointer, or what is there where the grid is moved.
const Allocation* allocation_of(const Allocation* at, const void* p, int64_t bytes) {
    const auto address = reinterpret_cast<uint64_t>(p);
    const bool is_moved = first_block[0] || first_block[1] || first_block[2];
    if (is_moved && !is_shared(at)) at = find(address);  // the pointer began elsewhere
    if (!at) fail("reads or writes memory that is not allocated");
    const auto base = reinterpret_cast<uint64_t>(at->base);
    if (address < base || address + static_cast<uint64_t>(bytes) > base + at->bytes)
        fail("reads or writes outside: " + std::to_string(bytes) + " bytes at offset " +
             std::to_string(static_cast<int64_t>(address - base)) + " of " +
             std::to_string(at->bytes));
    return at;
}

}  // namespace

void fail(const std::string& what) {
    throw Fault(kernel_name + ", block " + std::to_string(here.block[0]) + "," +
                std::to_string(here.block[1]) + "," + std::to_string(here.block[2]) + ", thread " +
                std::to_string(here.thread) + ": " + what);
}

void touch(const Allocation* at, const void* p, size_t bytes, size_t alignment, Access access) {
    auto& memory = *const_cast<Allocation*>(allocation_of(at, p, static_cast<int64_t>(bytes)));
    if (reinterpret_cast<uint64_t>(p) % alignment) fail("a misaligned address");
    const bool is_of_block = is_shared(&memory);
    if (!is_of_block && !block->threads[block->current].has_waited)
        fail("reads or writes global memory before its dependency_wait");
    if (!is_of_block && memory.launch != here.launch) {
        memory.forget();
        memory.launch = here.launch;
    }
    const auto first = static_cast<size_t>(static_cast<const uint8_t*>(p) - memory.base);
    for (size_t i = first; i < first + bytes;) {
        const size_t at_byte = i % WORD_BYTES, n = std::min(WORD_BYTES - at_byte, first + bytes - i);
        Word& word = memory.words[i / WORD_BYTES];
        if (word.is_awaited) fail("a copy to this memory is under way");
        uint8_t* const written = memory.is_written.data() + i;
        for (size_t byte = 0; byte < n; byte++) {
            if (access != Access::write && !written[byte])
                fail(std::string("reads ") + (is_of_block ? "shared" : "global") +
                     " memory that nothing has written, byte " + std::to_string(i + byte));
            written[byte] = true;
        }
        if (n < WORD_BYTES && !word.parts) {
            memory.parts.emplace_back().fill(word.whole);
            word.parts = static_cast<uint32_t>(memory.parts.size());
        }
        if (word.parts) {
            for (size_t byte = at_byte; byte < at_byte + n; byte++)
                note(memory.parts[word.parts - 1][byte], access);
        } else {
            note(word.whole, access);
        }
        i += n;
    }
}

void check_prefetch(const Allocation* at, const void* p, int64_t bytes) {
    if (bytes < 0 || bytes % 16 || reinterpret_cast<uint64_t>(p) % 16)
        fail("a prefetch of " + std::to_string(bytes) + " bytes that are not whole 16");
    allocation_of(at, p, bytes);
}

void dependency_wait() { block->threads[block->current].has_waited = true; }

// Of a copy of whole words.
void await(const Allocation* at, const void* p, size_t bytes, bool is_awaited) {
    auto& words = const_cast<Allocation*>(at)->words;
    const auto first = static_cast<size_t>(static_cast<const uint8_t*>(p) - at->base);
    for (size_t i = first; i < first + bytes; i += WORD_BYTES)
        words[i / WORD_BYTES].is_awaited = is_awaited;
}

// A copy may write from its beginning to the wait for it.
void begin_copy(const Allocation* at, const void* p, size_t bytes) {
    touch(at, p, bytes, bytes, Access::write);
    await(at, p, bytes, true);
}
void end_copy(const Allocation* at, const void* p, size_t bytes) {
    await(at, p, bytes, false);
    touch(at, p, bytes, bytes, Access::write);
}

const Allocation* find(uint64_t address) {
    auto after = allocations().upper_bound(address);
    if (after == allocations().begin()) return nullptr;
    const Allocation* const at = std::prev(after)->second.get();
    const auto base = reinterpret_cast<uint64_t>(at->base);
    return address <= base + at->bytes ? at : nullptr;
}

void barrier(int line) {
    Block& now = *block;
    Thread& self = now.threads[now.current];
    if (now.n_done) fail("waits at a barrier, and a thread has ended");
    if (now.at_barrier && now.barrier_line != line)
        fail("waits at the barrier of line " + std::to_string(line) + ", others at that of line " +
             std::to_string(now.barrier_line));
    const uint64_t calls = calls_to_here();
    if (now.at_barrier && now.barrier_calls != calls)
        fail("waits at the barrier of line " + std::to_string(line) + ", which others reach by other calls");
    now.barrier_calls = calls;
    now.barrier_line = self.line = line;
    self.state = State::at_barrier;
    if (++now.at_barrier == static_cast<int>(now.threads.size())) {
        now.at_barrier = 0;
        for (Thread& thread : now.threads) {
            thread.state = State::ready;
            thread.barriers++;
        }
    }
    yield();
}

void exchange(Words& words, int kind, int line, void (*compute)(Words* lanes)) {
    Block& now = *block;
    Thread& self = now.threads[now.current];
    Warp& warp = now.warps[now.current / WARP];
    if (warp.arrived && (warp.kind != kind || warp.line != line))
        fail("is in another collective at line " + std::to_string(line) + " than lanes at line " +
             std::to_string(warp.line));
    const uint64_t calls = calls_to_here();
    if (warp.arrived && warp.calls != calls)
        fail("is in the collective at line " + std::to_string(line) + ", which other lanes reach by other calls");
    warp.calls = calls;
    warp.kind = kind;
    warp.line = self.line = line;
    const uint64_t generation = warp.generation;
    Words* const lanes = warp.words[generation % 2];
    const int lane = now.current % WARP;
    std::memcpy(lanes[lane], words, sizeof words);
    if (++warp.arrived == WARP) {
        warp.arrived = 0;
        if (compute) compute(lanes);
        warp.generation++;
    } else {
        self.state = State::in_exchange;
        self.generation = generation;
        yield();
    }
    std::memcpy(words, lanes[lane], sizeof words);
}

void warp_barrier(int line) {
    Words words = {};
    exchange(words, WARP_BARRIER, line, [](Words*) { block->warps[block->current / WARP].barriers++; });
    here.warp_barriers = block->warps[block->current / WARP].barriers;
}

template <int k, bool is_unsigned>
void multiply(Words* lanes) {
    constexpr int ROWS = 16, COLUMNS = 8, OF_A = 4, OF_B = OF_A + k / 8, BYTES = 4;
    int16_t a[ROWS][k], b[COLUMNS][k];
    for (int lane = 0; lane < WARP; lane++) {
        const int row = lane / 4, first = lane % 4 * BYTES;
        for (int word = 0; word < k / 8; word++)
            for (int i = 0; i < BYTES; i++) {
                const uint64_t byte = lanes[lane][OF_A + word] >> 8 * i;
                a[row + word % 2 * 8][word / 2 * 16 + first + i] =
                    is_unsigned ? int16_t{static_cast<uint8_t>(byte)} : int16_t{static_cast<int8_t>(byte)};
            }
        for (int word = 0; word < k / 16; word++)
            for (int i = 0; i < BYTES; i++)
                b[row][word * 16 + first + i] = static_cast<int8_t>(lanes[lane][OF_B + word] >> 8 * i);
    }
    for (int row = 0; row < ROWS; row++)
        for (int column = 0; column < COLUMNS; column++) {
            int32_t sum = 0;
            for (int i = 0; i < k; i++) sum += a[row][i] * b[column][i];
            uint64_t& c = lanes[row % 8 * 4 + column / 2][row / 8 * 2 + column % 2];
            c = static_cast<uint32_t>(static_cast<int32_t>(c) + sum);
        }
}
template void multiply<32, false>(Words*);
template void multiply<32, true>(Words*);
template void multiply<16, false>(Words*);

void copy_later(std::function<void()> copy) {
    block->threads[block->current].open.push_back(std::move(copy));
}

void copies_commit() {
    Thread& self = block->threads[block->current];
    self.copies.push_back(std::move(self.open));
    self.open.clear();
}

void copies_wait(int n) {
    Thread& self = block->threads[block->current];
    while (self.copies.size() > static_cast<size_t>(n)) {
        for (const auto& copy : self.copies.front()) copy();
        self.copies.erase(self.copies.begin());
    }
}

void Kernel::add(const char* name, int threads_max, size_t n,
                 std::function<void(const uint64_t*)> call) {
    kernels()[name] = {threads_max, n, std::move(call)};
}

namespace {

constexpr int GRID_YZ_MAX = 65535;

// 0: rising; 1: falling; else shuffled with this seed.
std::vector<int> order_of(int n, uint64_t seed) {
    std::vector<int> order(n);
    std::iota(order.begin(), order.end(), 0);
    if (seed == 1) std::reverse(order.begin(), order.end());
    if (seed > 1) std::shuffle(order.begin(), order.end(), std::mt19937_64(seed));
    return order;
}

void launch(const std::string& name, const int32_t (&blocks)[3], int threads,
            const uint64_t* arguments, size_t n_arguments, uint64_t seed) {
    kernel_name = name;
    const auto found = kernels().find(name);
    if (found == kernels().end()) throw Fault("no kernel " + name);
    const Entry& entry = found->second;
    if (entry.n_arguments != n_arguments)
        throw Fault(name + " has " + std::to_string(entry.n_arguments) + " parameters, not " +
                    std::to_string(n_arguments));
    if (threads < WARP || threads % WARP || threads > entry.threads_max)
        throw Fault(name + ": " + std::to_string(threads) + " threads; whole warps up to " +
                    std::to_string(entry.threads_max));
    const int64_t n_blocks = int64_t{blocks[0]} * blocks[1] * blocks[2];
    if (blocks[0] < 1 || blocks[1] < 1 || blocks[2] < 1 || n_blocks >= 1 << 21 ||
        first_block[1] + blocks[1] > GRID_YZ_MAX || first_block[2] + blocks[2] > GRID_YZ_MAX)
        throw Fault(name + ": an impossible grid");
    here.launch = ++n_launches;
    here.threads = threads;
    for (int i = 0; i < 3; i++) here.blocks[i] = first_block[i] + blocks[i];
    const std::vector<int> order = order_of(threads, seed);
    const std::function<void()> body = [&] { entry.call(arguments); };
    for (const int i : order_of(static_cast<int>(n_blocks), seed)) {
        here.number = static_cast<uint32_t>(i);
        here.block[0] = first_block[0] + i % blocks[0];
        here.block[1] = first_block[1] + i / blocks[0] % blocks[1];
        here.block[2] = first_block[2] + i / blocks[0] / blocks[1];
        run_block(body, threads, order);
    }
}

// Runs `action`; the text of what it throws is kept for simt_error.
template <class Action>
int guarded(Action action) {
    try {
        action();
        return 0;
    } catch (const std::exception& error) {
        last_error = error.what();
        return 1;
    }
}

Allocation& whole(uint64_t address, size_t bytes) {
    const Allocation* const at = find(address);
    const auto base = at ? reinterpret_cast<uint64_t>(at->base) : 0;
    if (!at || address + bytes > base + at->bytes) throw Fault("a copy outside of an allocation");
    return *const_cast<Allocation*>(at);
}

}  // namespace
}  // namespace simt

extern "C" {

const char* simt_error() { return simt::last_error.c_str(); }

// The address of memory whose bytes are `fill`; 0 if there is none.
uint64_t simt_allocate(size_t bytes, int fill) {
    auto* const base = static_cast<uint8_t*>(std::aligned_alloc(256, (bytes + 511) / 256 * 256));
    if (!base) return 0;
    std::memset(base, fill, bytes);
    const auto address = reinterpret_cast<uint64_t>(base);
    auto allocation = std::make_unique<simt::Allocation>();
    allocation->base = base;
    allocation->bytes = bytes;
    allocation->is_written.resize(bytes);
    simt::allocations()[address] = std::move(allocation);
    return address;
}

int simt_free(uint64_t address) {
    return simt::guarded([&] {
        const auto found = simt::allocations().find(address);
        if (found == simt::allocations().end()) throw simt::Fault("frees what is not allocated");
        std::free(found->second->base);
        simt::allocations().erase(found);
    });
}

int simt_copy_in(uint64_t to, const void* from, size_t bytes) {
    return simt::guarded([&] {
        simt::Allocation& at = simt::whole(to, bytes);
        const auto first = at.is_written.begin() + (to - reinterpret_cast<uint64_t>(at.base));
        std::fill(first, first + bytes, true);
        std::memcpy(reinterpret_cast<void*>(to), from, bytes);
    });
}

int simt_copy_out(void* to, uint64_t from, size_t bytes) {
    return simt::guarded([&] {
        simt::whole(from, bytes);
        std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
    });
}

// Runs a kernel to its end. seed: the order of blocks and threads, see order_of. 0, or 1 and simt_error.
int simt_launch(const char* name, const int32_t* blocks, int threads, const uint64_t* arguments,
                size_t n_arguments, uint64_t seed) {
    return simt::guarded([&] {
        const int32_t grid[3] = {blocks[0], blocks[1], blocks[2]};
        simt::launch(name, grid, threads, arguments, n_arguments, seed);
    });
}

void simt_begin_at(const int32_t* block) { std::copy(block, block + 3, simt::first_block); }

// Names of the kernels, one a line.
const char* simt_kernels() {
    static std::string names;
    names.clear();
    for (const auto& [name, entry] : simt::kernels()) names += name + "\n";
    return names.c_str();
}

}  // extern "C"
