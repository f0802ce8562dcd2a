// Recurrent mixers: gated delta networks (rule 12) and Mamba-2 (rule 14), of three launches for a layer of
// recurrent/mixers.h each, and gated short convolutions (rule 15), of one.
//
// `convolve_heads` makes unit vectors of q and k, values, and the two factors of each value head, for all
// tokens at once. `recur_heads` takes the tokens of an entry in order: columns of a state do not meet, so a
// block has 32 of one head, a lane each, and a warp for each chain of rows. The state stays in registers: its
// image is read once and written once. `gate_heads` norms and gates what comes out of it. The launches of Mamba-2
// are `convolve_channels`, `recur_mamba2` and `gate_groups`.
#include "gpu.h"
#include "norm.h"

namespace {

constexpr int THREADS = 64;  // the lanes of rule 3
constexpr int GROUP_THREADS = 512;
constexpr int STATE_HEAD_DIM_MAX = 256;
constexpr int CHAINS_MAX = STATE_HEAD_DIM_MAX / ca::CHAIN;
constexpr int CHANNEL_THREADS = 256;  // of a block whose threads have a channel each
constexpr int FACTORS = 4;  // values of a value head behind its token's channels: decay, beta or step size, zeros
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

// A layer of the images, as StateShape has them. offset: of its values in an image.
struct Layer {
    int64_t offset;
    int n_k_head, n_v_head, key_dim, head_dim, key_run;

    GPU_FN int channels() const { return 2 * n_k_head * key_dim + n_v_head * head_dim; }
    GPU_FN int64_t head(int index) const { return offset + int64_t{index} * key_dim * head_dim; }
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

// One channel of a token, whose input `value(i)` is of token i of the step. t: its number in its entry. Its other
// inputs are in the entry's image from number `first` on, `stride` apart.
template <class Value>
GPU_FN float convolve_token(Value value, int64_t token, int t, const StateEntry& entry, int64_t first,
                            int64_t stride, int taps, gpu::In<float> weights) {
    const int before = taps - 1;
    const bool is_last = t == entry.n_tokens - 1;
    const gpu::Out<float> left = written_at(entry, first);
    const auto input = [&](int j) {
        if (t + j >= before) return value(token + j - before);
        return entry.read ? float(read_at(entry, first)[(t + j) * stride]) : 0.0f;
    };
    return taps == 4   ? convolve<4>(input, weights, is_last, left, stride)
           : taps == 3 ? convolve<3>(input, weights, is_last, left, stride)
                       : convolve<2>(input, weights, is_last, left, stride);
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

// The recurrence of one value head of an entry, 32 columns of it. convolved: rows of the channels and the factors.
template <bool IS_DELTA>
GPU_FN void recur(gpu::In<float> convolved, int stride, gpu::In<StateEntry> entries, const Layer& layer,
                  gpu::Out<float> out, int out_stride) {
    __shared__ gpu::Shared<gpu::Words4, RING * SLOT_WORDS> ring;
    __shared__ gpu::Shared<float, 2 * CHAINS_MAX * COLUMNS> learned, answered;
    const StateEntry entry = entries[gpu::block()];
    const int head = gpu::block_y(), column = gpu::block_z() * COLUMNS + gpu::lane();
    const int chain = gpu::warp(), chains = gpu::warps(), n = entry.n_tokens;
    const int head_dim = layer.head_dim, keys = layer.n_k_head * layer.key_dim;
    const int q_words = layer.key_dim / 4, values = 2 * q_words, factors = values + COLUMNS / 4;
    const bool is_column = IS_DELTA || column < head_dim;  // heads of Mamba-2 may have half a block

    // A thread copies a word of each token, or none: of the q and the k of the head, of the values of the
    // columns, and of the factors.
    const int word = gpu::thread(), k_head = head / layer.key_run % layer.n_k_head;
    const int first_value = IS_DELTA ? 2 * keys : 0, first_key = IS_DELTA ? keys : layer.n_v_head * head_dim;
    const int first_query = IS_DELTA ? 0 : first_key + keys;
    int64_t source = first_query + int64_t{k_head} * layer.key_dim + 4 * word;
    if (word >= q_words) source += first_key - first_query - layer.key_dim;
    if (word >= values)
        source = first_value + int64_t{head} * head_dim + gpu::block_z() * COLUMNS + 4 * (word - values);
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
    if (entry.read && is_column) {
        const gpu::In<float> from = read_at(entry, first);
        GPU_UNROLL
        for (int i = 0; i < ca::CHAIN; i++) s[i] = from[i * head_dim];
    } else {
        GPU_UNROLL
        for (int i = 0; i < ca::CHAIN; i++) s[i] = 0.0f;
    }

    const float scale = ca::state_scale(layer.key_dim);
    const auto answer = [&](int half) {
        const float sum = fold(answered, half, chains);
        return IS_DELTA ? ca::mul_rn(sum, scale) : sum;
    };
    const gpu::Out<float> rows =
        out + (int64_t{entry.first_token} * out_stride + head * head_dim + column);
    const int own = chain * ca::CHAIN / 4, place = chain * COLUMNS + gpu::lane();
    gpu::copies_wait<RING - 2>();
    gpu::barrier();
    if constexpr (IS_DELTA) learned[place] = product(s, ring, q_words + own);  // with the first key
    for (int t = 0; t < n; t++) {
        const int half = t % 2, other = 1 - half, slot = t % RING * SLOT_WORDS;
        gpu::copies_wait<RING - 3>();
        gpu::barrier();  // token t + 1 is there, t - 1 is done with, and the products of all chains are there
        fetch(t + RING - 1);
        const gpu::Words4 of_head = ring[slot + factors];
        const float decay = ca::float_of(of_head.word[0]), factor = ca::float_of(of_head.word[1]);
        const float value = ca::float_of(gpu::shared_word(ring, (slot + values) * 4 + gpu::lane()));
        float delta;
        if constexpr (IS_DELTA)
            delta = ca::state_delta(value, fold(learned, half, chains), decay, factor);
        else
            delta = ca::mul_rn(value, factor);
        if (t > 0 && chain == t % chains && is_column) rows[int64_t{t - 1} * out_stride] = answer(half);
        GPU_UNROLL
        for (int i = 0; i < ca::CHAIN; i += 4) {
            const gpu::Words4 k = ring[slot + q_words + own + i / 4];
            GPU_UNROLL
            for (int j = 0; j < 4; j++)
                s[i + j] = ca::state_value(s[i + j], decay, ca::float_of(k.word[j]), delta);
        }
        answered[other * CHAINS_MAX * COLUMNS + place] = product(s, ring, slot + own);
        if (IS_DELTA && t + 1 < n)
            learned[other * CHAINS_MAX * COLUMNS + place] =
                product(s, ring, (t + 1) % RING * SLOT_WORDS + q_words + own);
    }
    gpu::copies_wait<0>();
    const gpu::Out<float> to = written_at(entry, first);
    if (is_column) {
        GPU_UNROLL
        for (int i = 0; i < ca::CHAIN; i++) to[i * head_dim] = s[i];
    }
    gpu::barrier();
    if (chain == 0 && is_column) rows[int64_t{n - 1} * out_stride] = answer(n % 2);
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
    const Layer layer = {offset, n_k_head, n_v_head, head_dim, head_dim, 1};
    const int64_t token = gpu::block(), channels = layer.channels();
    const StateEntry entry = entries[entry_of[gpu::block()]];
    const int head = gpu::block_y(), t = gpu::block() - entry.first_token;
    const bool is_value = head >= 2 * n_k_head;
    const gpu::Out<float> row = out + token * out_stride;
    for (int d = gpu::thread(); d < head_dim; d += THREADS) {
        const int channel = head * head_dim + d;
        const auto input = [&](int64_t i) { return float(projected[i * stride + channel]); };
        const float c = convolve_token(input, token, t, entry, layer.inputs() + channel, channels, taps,
                                       weights + int64_t{channel} * taps);
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
    recur<true>(convolved, stride, entries, {offset, n_k_head, n_v_head, head_dim, head_dim, key_run}, out,
                out_stride);
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

// projected: rows of x, B and C, z, and dt. bias: of the convolution, or null. out: rows of the channels, convolved;
// then FACTORS values for each head. The images get the last inputs of each entry. Grid: tokens, blocks that share
// the channels and heads of a row.
KERNEL(convolve_channels, CHANNEL_THREADS, gpu::In<float> projected, int stride, gpu::In<int32_t> entry_of,
       gpu::In<StateEntry> entries, int64_t offset, int n_group, int n_head, int state_dim, int head_dim, int taps,
       gpu::In<float> weights, gpu::In<float> bias, gpu::In<float> dt_bias, gpu::In<float> a, gpu::Out<float> out,
       int out_stride) {
    gpu::begin();
    const Layer layer = {offset, n_group, n_head, state_dim, head_dim, n_head / n_group};
    const int64_t token = gpu::block();
    const int channels = layer.channels(), channel = gpu::block_y() * gpu::threads() + gpu::thread();
    const gpu::Out<float> row = out + token * out_stride;
    if (channel < channels) {
        const StateEntry entry = entries[entry_of[gpu::block()]];
        const auto input = [&](int64_t i) { return float(projected[i * stride + channel]); };
        float c = convolve_token(input, token, gpu::block() - entry.first_token, entry,
                                 layer.inputs() + channel, channels, taps, weights + int64_t{channel} * taps);
        if (bias) c = ca::add_rn(c, bias[channel]);
        row[channel] = ca::sigmoid_times(c, c);
    } else if (channel < channels + n_head) {
        const int head = channel - channels;
        const float dt = projected[token * stride + channels + int64_t{n_head} * head_dim + head];
        const gpu::Out<float> factors = row + (channels + head * FACTORS);
        factors[0] = ca::state_decay(dt, dt_bias[head], a[head]);
        factors[1] = ca::step_size(dt, dt_bias[head]);
        for (int i = 2; i < FACTORS; i++) factors[i] = 0.0f;
    }
}

// convolved: rows of `convolve_channels`. out: the products of each state and C. Grid: (entries, n_head, blocks of
// 32 columns), state_dim threads.
KERNEL(recur_mamba2, STATE_HEAD_DIM_MAX, gpu::In<float> convolved, int stride, gpu::In<StateEntry> entries,
       int64_t offset, int n_group, int n_head, int state_dim, int head_dim, gpu::Out<float> out, int out_stride) {
    gpu::begin();
    recur<false>(convolved, stride, entries, {offset, n_group, n_head, state_dim, head_dim, n_head / n_group}, out,
                 out_stride);
}

// out: rows of `recur_mamba2`, which get what x of `convolved` adds past the state, are gated by z of `projected`,
// whose first value is number z of a row, and normed, group by group, unless norm is null. width: of a group.
// Grid: (tokens, n_group), at least 64 threads.
KERNEL(gate_groups, GROUP_THREADS, gpu::In<float> projected, int stride, int z, gpu::In<float> convolved,
       int convolved_stride, int head_dim, gpu::In<float> d, gpu::In<float> norm, float eps, int width,
       gpu::Out<float> out, int out_stride) {
    __shared__ gpu::Shared<float, gpu::NORM_VALUES> part;
    __shared__ gpu::Shared<float, 64> lanes;
    gpu::begin();
    const int64_t token = gpu::block();
    const int first = gpu::block_y() * width;
    const gpu::In<float> gates = projected + (token * stride + z + first);
    const gpu::In<float> x = convolved + (token * convolved_stride + first);
    const gpu::Out<float> row = out + (token * out_stride + first);
    const auto gated = [&](int k) {
        return ca::gated_state(row[k], d[(first + k) / head_dim], x[k], gates[k]);
    };
    if (norm) {
        const float factor = gpu::norm_factor(gated, width, eps, part, lanes);
        for (int k = gpu::thread(); k < width; k += gpu::threads())
            row[k] = ca::norm_value(gated(k), factor, norm[first + k]);
    } else {
        for (int k = gpu::thread(); k < width; k += gpu::threads()) row[k] = gated(k);
    }
}

// projected: rows of b, c and x, `width` channels each. out: c times the convolution of b times x. The images get
// the last products of each entry. Grid: tokens, blocks that share a row.
KERNEL(convolve_gated, CHANNEL_THREADS, gpu::In<float> projected, int stride, gpu::In<int32_t> entry_of,
       gpu::In<StateEntry> entries, int64_t offset, int width, int taps, gpu::In<float> weights,
       gpu::Out<float> out, int out_stride) {
    gpu::begin();
    const int64_t token = gpu::block();
    const int channel = gpu::block_y() * gpu::threads() + gpu::thread();
    if (channel >= width) return;
    const StateEntry entry = entries[entry_of[gpu::block()]];
    const gpu::In<float> b = projected + channel, c = b + width, x = c + width;
    const auto input = [&](int64_t i) { return ca::mul_rn(b[i * stride], x[i * stride]); };
    const float sum = convolve_token(input, token, gpu::block() - entry.first_token, entry, offset + channel, width,
                                     taps, weights + int64_t{channel} * taps);
    out[token * out_stride + channel] = ca::mul_rn(c[token * stride], sum);
}
