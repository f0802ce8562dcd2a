// Device code of every function of ca.h and choice.h: the table takes their addresses.
#include "common/ca.h"
#include "experts/choice.h"

#define ADDRESS(name) reinterpret_cast<const void*>(ca::name)

__device__ const void* const FUNCTIONS[] = {
    ADDRESS(bits_of), ADDRESS(float_of), ADDRESS(add_rn), ADDRESS(sub_rn), ADDRESS(mul_rn),
    ADDRESS(div_rn), ADDRESS(sqrt_rn), ADDRESS(fma_rn), ADDRESS(float_rn), ADDRESS(ceil_exact),
    ADDRESS(canonical_nan), ADDRESS(is_finite), ADDRESS(magnitude_bits), ADDRESS(power_of_two),
    ADDRESS(round_to_int), ADDRESS(round_large), ADDRESS(half_to_float), ADDRESS(float_to_half),
    ADDRESS(bf16_to_float), ADDRESS(scale_by_magic), ADDRESS(exp2c), ADDRESS(expc), ADDRESS(logc),
    ADDRESS(sigmoid_times), ADDRESS(gelu_argument), ADDRESS(one_if_finite), ADDRESS(within), ADDRESS(gated),
    ADDRESS(relu2),
    ADDRESS(group_kind), ADDRESS(group_scale), ADDRESS(largest_of),
    ADDRESS(quantise_group), ADDRESS(step), ADDRESS(step_of_power), ADDRESS(power_of_field),
    ADDRESS(sum_of_squares), ADDRESS(norm_factor),
    ADDRESS(norm_value), ADDRESS(rotate), ADDRESS(hadamard_width), ADDRESS(transform_width),
    ADDRESS(hadamard), ADDRESS(kv8_scale), ADDRESS(kv8_inverse),
    ADDRESS(kv8_value), ADDRESS(kv8_group), ADDRESS(quantise_query), ADDRESS(weight_exponent),
    ADDRESS(weight_unit), ADDRESS(page_softmax), ADDRESS(numerator), ADDRESS(fold), ADDRESS(sink_of),
    ADDRESS(finish),
    ADDRESS(penalised), ADDRESS(weight_of), ADDRESS(integer_weight), ADDRESS(share_of), ADDRESS(falling_key), ADDRESS(philox),
    ADDRESS(fraction_of), ADDRESS(log_of_sum), ADDRESS(log_probability),
    ADDRESS(is_softmax), ADDRESS(has_logit_keys), ADDRESS(softmax_of_all), ADDRESS(add_key), ADDRESS(group_order), ADDRESS(part_of_all), ADDRESS(sum_of_all), ADDRESS(kept_groups),
    ADDRESS(choice_key), ADDRESS(weight_part), ADDRESS(weight_of_part), ADDRESS(select_experts),
    ADDRESS(add_expert),
    ADDRESS(sigmoid), ADDRESS(tanhc), ADDRESS(capped), ADDRESS(softplus), ADDRESS(convolved), ADDRESS(unit_factor), ADDRESS(state_decay),
    ADDRESS(fold_chains), ADDRESS(column_product), ADDRESS(state_delta), ADDRESS(state_value),
    ADDRESS(state_scale), ADDRESS(gated_norm), ADDRESS(gate_value), ADDRESS(add_share), ADDRESS(step_size),
    ADDRESS(gated_state)};

__global__ void take(int i, const void** out) { *out = FUNCTIONS[i]; }
