#version 450
#extension GL_GOOGLE_include_directive : enable
// One step of a recurrent layer: the gates of the state, and the state after. The dispatch is repeated
// for each step.
//
// LANES neighbours of a subgroup take one unit of the state, of ROWS rows of the batch: they share the
// columns of the weight, and add up by shuffles. Then each of the first ROWS lanes finishes a row.
// A layer in both directions takes a step of each.
//
// Buffers: gates [steps, batches, directions * GATES * H] (what the input adds to the gates, with its
//   bias), weight [directions * GATES * H, H], bias [directions * GATES * H] (if BIAS), state
//   [directions, batches, H] (before the first step), out [steps, batches, directions * H], which is
//   read as made; for an LSTM also before and cell [directions, batches, H], the cells before the first
//   and after the last step. All are of type T; their last dims are dense. lengths [batches], dense, are
//   the steps of each row (if LENGTHS).
// Gates are in torch's order, see `recurrent.glslh`. Offsets and strides are in elements.
// Macros:
//   T      float, float16_t, uint16_t (bfloat16) or double
//   ACC    what sums are: double if T is (with HAS_FLOAT64), else float
//   KIND   0: tanh, 1: relu, 2: GRU, 3: LSTM
//   LOCAL  invocations of a workgroup, a multiple of the subgroup size
//   LANES  invocations of a unit, a power of 2, at most the subgroup size and at least ROWS; 1 for devices
//          without shuffles
//   ROWS   rows of an invocation
//   VEC4   1: H, and the offsets and strides of weight, state and out, are multiples of 4
//   BIAS   1: there is a bias
//   LENGTHS  1: rows of the batch have fewer steps, see `recurrent.glslh`
// Grid: (ceil(H * LANES / LOCAL), ceil(batches / ROWS), directions). The second direction begins at the
// last step.
#include "core/common.glslh"
#include "core/elements.glslh"
#include "core/math.glslh"

#ifndef T
#define T float
#endif
#ifndef ACC
#define ACC float
#endif
#ifndef LOCAL
#define LOCAL 128
#endif
#ifndef LANES
#define LANES 8
#endif
#ifndef ROWS
#define ROWS 1
#endif
#ifndef VEC4
#define VEC4 0
#endif
#ifndef BIAS
#define BIAS 0
#endif
#ifndef LENGTHS
#define LENGTHS 0
#endif
#include "matmul/recurrent.glslh"

PARAM(0, steps)
PARAM(1, batches)
PARAM(2, H)  // units of the state
PARAM(3, offset_gates)
PARAM(4, gates_step)  // from one step to the next
PARAM(5, gates_row)  // from one row of the batch to the next
PARAM(6, offset_weight)
PARAM(7, weight_row)
PARAM(8, offset_state)
PARAM(9, state_direction)
PARAM(10, state_row)
PARAM(11, offset_out)
PARAM(12, out_step)
PARAM(13, out_row)
#if BIAS
PARAM(14, offset_bias)
#endif
#if KIND == 3
PARAM(15, offset_before)
PARAM(16, before_direction)
PARAM(17, before_row)
PARAM(18, offset_cell)
PARAM(19, cell_direction)
PARAM(20, cell_row)
#endif
#if LENGTHS
PARAM(21, offset_lengths)
#endif
PARAM(22, iteration)

READONLY_BUFFER(0, gates, T)
#if VEC4
READONLY_BUFFER(1, weight, QUAD_OF(T))
READONLY_BUFFER(2, state, QUAD_OF(T))
READONLY_BUFFER(3, made, QUAD_OF(T))
#else
READONLY_BUFFER(1, weight, T)
READONLY_BUFFER(2, state, T)
READONLY_BUFFER(3, made, T)
#endif
#if BIAS
READONLY_BUFFER(4, bias, T)
#endif
WRITEONLY_BUFFER(4 + BIAS, out, T)
#if KIND == 3
READONLY_BUFFER(5 + BIAS, before, T)
BUFFER(6 + BIAS, cell, T)
#endif
#if KIND == 3
#define LENGTHS_BINDING (7 + BIAS)
#else
#define LENGTHS_BINDING (5 + BIAS)
#endif
#if LENGTHS
READONLY_BUFFER(LENGTHS_BINDING, lengths, int)
#endif

// Elements of the state before the step, which is at `i` of its tensor.
#if VEC4
vec4 state_quad(int i) {
    if (iteration == 0) return FLOATS_OF(T, buf_state[i >> 2]);
    return FLOATS_OF(T, buf_made[i >> 2]);
}
float state_at(int i) { return state_quad(i)[i & 3]; }
#else
ACC state_at(int i) {
    if (iteration == 0) return FLOAT_OF(T, buf_state[i]);
    return FLOAT_OF(T, buf_made[i]);
}
#endif

// Where the state of a row before the step starts, in its tensor.
int start_of_state(int row, int direction) {
    if (iteration == 0) return offset_state + direction * state_direction + row * state_row;
    int earlier = step_at(iteration - 1, STEPS_OF(row), direction);
    return offset_out + earlier * out_step + row * out_row + direction * H;
}

layout(local_size_x = LOCAL, local_size_y = 1, local_size_z = 1) in;

LOOPS(loop(ceil(H, LANES)))

void main() {
    int id = int(WORKGROUP_ID.x) * LOCAL + int(gl_LocalInvocationIndex);
    int unit = min(id / LANES, H - 1), lane = id % LANES, row0 = int(WORKGROUP_ID.y) * ROWS;
    int direction = int(WORKGROUP_ID.z), first = direction * GATES * H;  // row of the weight
    ACC sum[GATES][ROWS];
    UNROLL for (int g = 0; g < GATES; g++) UNROLL for (int r = 0; r < ROWS; r++) sum[g][r] = 0.0;
    int from[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++) from[r] = start_of_state(min(row0 + r, batches - 1), direction);
#if VEC4
    int quads = H >> 2, row_of_unit = (offset_weight + (first + unit) * weight_row) >> 2, gate = (H * weight_row) >> 2;
    for (int q = lane; q < quads; q += LANES) {
        vec4 w[GATES];
        UNROLL for (int g = 0; g < GATES; g++) w[g] = FLOATS_OF(T, buf_weight[row_of_unit + g * gate + q]);
        UNROLL for (int r = 0; r < ROWS; r++) {
            vec4 state = state_quad(from[r] + 4 * q);
            UNROLL for (int g = 0; g < GATES; g++) sum[g][r] += dot(w[g], state);
        }
    }
#else
    for (int k = lane; k < H; k += LANES) {
        ACC w[GATES];
        UNROLL for (int g = 0; g < GATES; g++) w[g] = FLOAT_OF(T, buf_weight[offset_weight + (first + g * H + unit) * weight_row + k]);
        UNROLL for (int r = 0; r < ROWS; r++) {
            ACC state = state_at(from[r] + k);
            UNROLL for (int g = 0; g < GATES; g++) sum[g][r] += w[g] * state;
        }
    }
#endif
#if LANES > 1
    UNROLL for (int step = 0; step < LOG2_OF(LANES); step++) {
        UNROLL for (int g = 0; g < GATES; g++) {
            UNROLL for (int r = 0; r < ROWS; r++) sum[g][r] += subgroupShuffleXor(sum[g][r], uint(LANES / 2 >> step));
        }
    }
#endif
    ACC mine[GATES];
    UNROLL for (int g = 0; g < GATES; g++) {
        mine[g] = sum[g][0];
        UNROLL for (int r = 1; r < ROWS; r++) mine[g] = lane == r ? sum[g][r] : mine[g];
    }
    int row = row0 + lane;
    bool finishes = id / LANES < H && lane < ROWS && row < batches;
    int count = STEPS_OF(min(row, batches - 1)), t = step_at(iteration, count, direction);
    ACC given[GATES], bias[GATES], before = 0.0, cell = 0.0;
    UNROLL for (int g = 0; g < GATES; g++) given[g] = bias[g] = 0.0;
    if (finishes) {
        UNROLL for (int g = 0; g < GATES; g++) {
            given[g] = FLOAT_OF(T, buf_gates[offset_gates + t * gates_step + row * gates_row + first + g * H + unit]);
#if BIAS
            bias[g] = FLOAT_OF(T, buf_bias[offset_bias + first + g * H + unit]);
#endif
        }
#if KIND == 2
        before = state_at(start_of_state(row, direction) + unit);
#elif KIND == 3
        if (iteration == 0) cell = FLOAT_OF(T, buf_before[offset_before + direction * before_direction + row * before_row + unit]);
        else cell = FLOAT_OF(T, buf_cell[offset_cell + direction * cell_direction + row * cell_row + unit]);
#endif
    }
    UNROLL for (int g = 0; g < GATES; g++) mine[g] += bias[g];
    if (!finishes) return;
#if LENGTHS
    if (iteration >= count) {
        buf_out[offset_out + iteration * out_step + row * out_row + direction * H + unit] = ELEMENT_OF(T, 0.0);
        return;
    }
#endif
    ACC after = state_after(given, mine, before, cell);
    buf_out[offset_out + t * out_step + row * out_row + direction * H + unit] = ELEMENT_OF(T, after);
#if KIND == 3
    buf_cell[offset_cell + direction * cell_direction + row * cell_row + unit] = ELEMENT_OF(T, cell);
#endif
}
