// Gated delta networks (rule 12): three launches for a layer of recurrent/delta_net.h.
//
// `convolve_heads` makes unit vectors of q and k, values, and the two factors of each value head, for all
// tokens at once. `recur_heads` takes the tokens of an entry in order: columns of a state do not meet, so a
// block has 32 of one head, a lane each, and a warp for each chain of rows. The state stays in registers: its
// image is read once and written once. `gate_heads` norms and gates what comes out of it.
#include "gpu.h"

namespace {

constexpr int THREADS = 64;  // the lanes of rule 3
constexpr int STATE_HEAD_DIM_MAX = 256;
constexpr int CHAINS_MAX = STATE_HEAD_DIM_MAX / ca::CHAIN;
constexpr int FACTORS = 4;  // values of a value head behind its token's channels: decay, beta, and two zeros
constexpr int COLUMNS = gpu::WARP;
constexpr int RING = 8;                                   // tokens in shared memory, one of them in use
constexpr int Q_WORDS_MAX = STATE_HEAD_DIM_MAX / 4;       // copies of 16 bytes
constexpr int SLOT_WORDS = 2 * Q_WORDS_MAX + COLUMNS / 4 + 1;  // of a token: q, k, values, factors

// What a step does to the state of an entry. read: the address of an image, 0 for zeros.
struct alignas(16) StateEntry {
    uint64_t read;
    uint64_t written;
    int32_t first_token;
    int32_t n_tokens;
    int32_t unused[2];
};

// Values of an entry's images from number `first` on.
GPU_FN gpu::In<float> read_at(const StateEntry& entry, int64_t first) {
    return gpu::in_at<float>(entry.read + 4 * first);
}
GPU_FN gpu::Out<float> written_at(const StateEntry& entry, int64_t first) {
    return gpu::out_at<float>(entry.written + 4 * first);
}

// A layer of the images. offset: of its values in an image.
struct Layer {
    int64_t offset;
    int n_k_head, n_v_head, head_dim;

    GPU_FN int channels() const { return (2 * n_k_head + n_v_head) * head_dim; }
    GPU_FN int64_t head(int index) const { return offset + int64_t{index} * head_dim * head_dim; }
    GPU_FN int64_t inputs() const { return head(n_v_head); }  // of the convolution
};

// The sum of squares of n values by rule 3, 64 threads.
GPU_FN float sum_of_squares(gpu::Shared<float, STATE_HEAD_DIM_MAX>& x, int n,
                            gpu::Shared<float, THREADS>& lanes) {
    float lane = 0.0f;
    for (int i = gpu::thread(); i < n; i += THREADS) {
        const float value = x[i];
        lane = ca::fma_rn(value, value, lane);
    }
    lanes[gpu::thread()] = lane;
    for (int width = THREADS / 2; width >= 1; width /= 2) {
        gpu::barrier();
        if (gpu::thread() < width)
            lanes[gpu::thread()] = ca::add_rn(lanes[gpu::thread()], lanes[gpu::thread() + width]);
    }
    gpu::barrier();
    return lanes[0];
}

// One channel of a token, of whose inputs `input(j)` is the j-th, the oldest first; as the entry's last token
// it leaves all but the oldest to `left`, which are `stride` apart.
template <int taps, class Input>
GPU_FN float convolve(Input input, gpu::In<float> weights, bool is_last, gpu::Out<float> left, int64_t stride) {
    float x[taps], w[taps];
    GPU_UNROLL
    for (int j = 0; j < taps; j++) x[j] = input(j), w[j] = weights[j];
    if (is_last) {
        GPU_UNROLL
        for (int j = 1; j < taps; j++) left[(j - 1) * stride] = x[j];
    }
    return ca::convolved(x, 1, w, taps);
}

// The sum of the chains of a column: the tree of ca::fold_chains, in which -0 leaves a sum as it is.
GPU_FN float fold(gpu::Shared<float, 2 * CHAINS_MAX * COLUMNS>& partial, int half, int chains) {
    float sum[CHAINS_MAX];
    GPU_UNROLL
    for (int c = 0; c < CHAINS_MAX; c++)
        sum[c] = c < chains ? partial[(half * CHAINS_MAX + c) * COLUMNS + gpu::lane()] : -0.0f;
    GPU_UNROLL
    for (int n = CHAINS_MAX / 2; n >= 1; n /= 2) {
        GPU_UNROLL
        for (int c = 0; c < n; c++) sum[c] = ca::add_rn(sum[2 * c], sum[2 * c + 1]);
    }
    return sum[0];
}

// The product of a chain's rows of a column and of a key or query, which begins at a word of shared memory.
GPU_FN float product(const float (&s)[ca::CHAIN], gpu::Shared<gpu::Words4, RING * SLOT_WORDS>& ring, int word) {
    float sum = 0.0f;
    GPU_UNROLL
    for (int i = 0; i < ca::CHAIN; i += 4) {
        const gpu::Words4 x = ring[word + i / 4];
        GPU_UNROLL
        for (int j = 0; j < 4; j++) sum = ca::fma_rn(ca::float_of(x.word[j]), s[i + j], sum);
    }
    return sum;
}

}  // namespace

// projected: rows of q, k and value heads, z, beta and alpha. entry_of: per token. out: rows of the
// channels, convolved, of q and k unit vectors; then FACTORS values for each value head. The images get the
// last inputs of each entry. Grid: (tokens, 2 n_k_head + n_v_head), 64 threads.
KERNEL(convolve_heads, THREADS, gpu::In<float> projected, int stride, gpu::In<int32_t> entry_of,
       gpu::In<StateEntry> entries, int64_t offset, int n_k_head, int n_v_head, int head_dim, int taps,
       gpu::In<float> weights, gpu::In<float> dt_bias, gpu::In<float> a, float eps, gpu::Out<float> out,
       int out_stride) {
    gpu::begin();
    __shared__ gpu::Shared<float, STATE_HEAD_DIM_MAX> value;
    __shared__ gpu::Shared<float, THREADS> lanes;
    const Layer layer = {offset, n_k_head, n_v_head, head_dim};
    const int64_t token = gpu::block(), channels = layer.channels();
    const StateEntry entry = entries[entry_of[gpu::block()]];
    const int head = gpu::block_y(), t = gpu::block() - entry.first_token, before = taps - 1;
    const bool is_last = t == entry.n_tokens - 1, is_value = head >= 2 * n_k_head;
    const gpu::Out<float> row = out + token * out_stride;
    for (int d = gpu::thread(); d < head_dim; d += THREADS) {
        const int channel = head * head_dim + d;
        const gpu::In<float> w = weights + int64_t{channel} * taps;
        const int64_t first = layer.inputs() + channel;  // of the entry's inputs of this channel
        const gpu::Out<float> left = written_at(entry, first);
        const auto input = [&](int j) {
            if (t + j >= before) return float(projected[(token + j - before) * stride + channel]);
            return entry.read ? float(read_at(entry, first)[(t + j) * channels]) : 0.0f;
        };
        const float c = taps == 4   ? convolve<4>(input, w, is_last, left, channels)
                        : taps == 3 ? convolve<3>(input, w, is_last, left, channels)
                                    : convolve<2>(input, w, is_last, left, channels);
        value[d] = ca::sigmoid_times(c, c);
    }
    gpu::barrier();
    float factor = 1.0f;
    if (!is_value) factor = ca::unit_factor(sum_of_squares(value, head_dim, lanes), eps);
    for (int d = gpu::thread(); d < head_dim; d += THREADS) {
        const float x = value[d];
        row[head * head_dim + d] = is_value ? x : ca::mul_rn(x, factor);
    }
    if (is_value && gpu::thread() < FACTORS) {
        const int index = head - 2 * n_k_head;
        const gpu::In<float> beta = projected + (token * stride + channels + int64_t{n_v_head} * head_dim + index);
        float x = 0.0f;
        if (gpu::thread() == 0) x = ca::state_decay(beta[n_v_head], dt_bias[index], a[index]);
        if (gpu::thread() == 1) x = ca::sigmoid(beta[0]);
        row[channels + index * FACTORS + gpu::thread()] = x;
    }
}

// convolved: rows of `convolve_heads`. key_run: value heads in a row that use the same q and k. out: the
// products of each state and query. Grid: (entries, n_v_head, head_dim / 32), head_dim threads.
KERNEL(recur_heads, STATE_HEAD_DIM_MAX, gpu::In<float> convolved, int stride, gpu::In<StateEntry> entries,
       int64_t offset, int n_k_head, int n_v_head, int head_dim, int key_run, gpu::Out<float> out,
       int out_stride) {
    gpu::begin();
    __shared__ gpu::Shared<gpu::Words4, RING * SLOT_WORDS> ring;
    __shared__ gpu::Shared<float, 2 * CHAINS_MAX * COLUMNS> learned, answered;
    const Layer layer = {offset, n_k_head, n_v_head, head_dim};
    const StateEntry entry = entries[gpu::block()];
    const int head = gpu::block_y(), column = gpu::block_z() * COLUMNS + gpu::lane();
    const int chain = gpu::warp(), chains = gpu::warps(), n = entry.n_tokens;
    const int q_words = head_dim / 4, values = 2 * q_words, factors = values + COLUMNS / 4;

    // A thread copies a word of each token, or none: of the q and the k of the head, of the values of the
    // columns, and of the factors.
    const int word = gpu::thread(), k_head = head / key_run % n_k_head;
    int64_t source = int64_t{k_head} * head_dim + 4 * word;
    if (word >= q_words) source += int64_t{n_k_head - 1} * head_dim;
    if (word >= values)
        source = int64_t{2 * n_k_head + head} * head_dim + gpu::block_z() * COLUMNS + 4 * (word - values);
    if (word == factors) source = layer.channels() + int64_t{head} * FACTORS;
    const auto fetch = [&](int t) {
        if (t < n && word <= factors)
            gpu::copy_async(ring[t % RING * SLOT_WORDS + word],
                            gpu::in_as<gpu::Words4>(convolved + ((int64_t{entry.first_token} + t) * stride + source)));
        gpu::copies_commit();
    };
    for (int t = 0; t < RING - 1; t++) fetch(t);

    const int64_t first = layer.head(head) + int64_t{chain} * ca::CHAIN * head_dim + column;
    float s[ca::CHAIN];
    if (entry.read) {
        const gpu::In<float> from = read_at(entry, first);
        GPU_UNROLL
        for (int i = 0; i < ca::CHAIN; i++) s[i] = from[i * head_dim];
    } else {
        GPU_UNROLL
        for (int i = 0; i < ca::CHAIN; i++) s[i] = 0.0f;
    }

    const float scale = ca::state_scale(head_dim);
    const gpu::Out<float> rows =
        out + (int64_t{entry.first_token} * out_stride + head * head_dim + column);
    const int own = chain * ca::CHAIN / 4, place = chain * COLUMNS + gpu::lane();
    gpu::copies_wait<RING - 2>();
    gpu::barrier();
    learned[place] = product(s, ring, q_words + own);  // with the first key
    for (int t = 0; t < n; t++) {
        const int half = t % 2, other = 1 - half, slot = t % RING * SLOT_WORDS;
        gpu::copies_wait<RING - 3>();
        gpu::barrier();  // token t + 1 is there, t - 1 is done with, and the products of all chains are there
        fetch(t + RING - 1);
        const gpu::Words4 of_head = ring[slot + factors];
        const float decay = ca::float_of(of_head.word[0]), beta = ca::float_of(of_head.word[1]);
        const float value = ca::float_of(gpu::shared_word(ring, (slot + values) * 4 + gpu::lane()));
        const float delta = ca::state_delta(value, fold(learned, half, chains), decay, beta);
        if (t > 0 && chain == t % chains)
            rows[int64_t{t - 1} * out_stride] = ca::mul_rn(fold(answered, half, chains), scale);
        GPU_UNROLL
        for (int i = 0; i < ca::CHAIN; i += 4) {
            const gpu::Words4 k = ring[slot + q_words + own + i / 4];
            GPU_UNROLL
            for (int j = 0; j < 4; j++)
                s[i + j] = ca::state_value(s[i + j], decay, ca::float_of(k.word[j]), delta);
        }
        answered[other * CHAINS_MAX * COLUMNS + place] = product(s, ring, slot + own);
        if (t + 1 < n)
            learned[other * CHAINS_MAX * COLUMNS + place] =
                product(s, ring, (t + 1) % RING * SLOT_WORDS + q_words + own);
    }
    gpu::copies_wait<0>();
    const gpu::Out<float> to = written_at(entry, first);
    GPU_UNROLL
    for (int i = 0; i < ca::CHAIN; i++) to[i * head_dim] = s[i];
    gpu::barrier();
    if (chain == 0) rows[int64_t{n - 1} * out_stride] = ca::mul_rn(fold(answered, n % 2, chains), scale);
}

// out: rows of `recur_heads`, which are normed, head by head, and gated by z of `projected`, whose first
// value is number z of a row. Grid: (tokens, n_v_head), 64 threads.
KERNEL(gate_heads, THREADS, gpu::In<float> projected, int stride, int z, int head_dim, gpu::In<float> norm,
       float eps, gpu::Out<float> out, int out_stride) {
    gpu::begin();
    __shared__ gpu::Shared<float, STATE_HEAD_DIM_MAX> value;
    __shared__ gpu::Shared<float, THREADS> lanes;
    const int64_t token = gpu::block(), first = int64_t{gpu::block_y()} * head_dim;
    const gpu::In<float> gates = projected + (token * stride + z + first);
    const gpu::Out<float> head = out + (token * out_stride + first);
    for (int d = gpu::thread(); d < head_dim; d += THREADS) value[d] = head[d];
    gpu::barrier();
    const float factor = ca::norm_factor(sum_of_squares(value, head_dim, lanes), head_dim, eps);
    for (int d = gpu::thread(); d < head_dim; d += THREADS)
        head[d] = ca::gated_norm(value[d], factor, norm[d], gates[d]);
}
