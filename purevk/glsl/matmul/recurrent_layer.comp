#version 450
#extension GL_GOOGLE_include_directive : enable
// All steps of a recurrent layer whose weight fits into the registers of a workgroup. For GPUs.
//
// A workgroup takes ROWS rows of the batch and one direction, and keeps the weight in registers from
// step to step. LANES neighbours of a subgroup take one unit of the state: each has every LANES-th
// vector of its rows of the weight. They add up by shuffles, and each of the first ROWS lanes finishes
// a row. The states before and after a step are in shared memory, so that a step takes one barrier.
// States and cells between steps are not rounded to T. Where a device ends loops that are so long, the
// dispatch is repeated for each `most` steps.
//
// Buffers: gates [steps, batches, directions * GATES * H] (what the input adds to the gates, with its
//   bias), weight [directions * GATES * H, H], bias [directions * GATES * H] (if BIAS), state
//   [directions, batches, H] (before the first step), out [steps, batches, directions * H]; for an LSTM
//   also before and cell [directions, batches, H], the cells before the first and after the last step.
//   All are of type T; their last dims are dense. lengths [batches], dense, are the steps of each row
//   (if LENGTHS).
// Gates are in torch's order, see `recurrent.glslh`. Offsets and strides are in elements.
// Macros:
//   T      float, float16_t or uint16_t (bfloat16)
//   KIND   0: tanh, 1: relu, 2: GRU, 3: LSTM
//   H      units of the state
//   LANES  invocations of a unit, a power of 2, at most the subgroup size and at least ROWS
//   LOCAL  invocations of the workgroup: at least H * LANES, a multiple of the subgroup size
//   ROWS   rows of the batch of a workgroup
//   VEC4   1: H, and the offset and stride of the weight, are multiples of 4
//   BIAS   1: there is a bias
//   LENGTHS  1: rows of the batch have fewer steps, see `recurrent.glslh`
// Grid: (ceil(batches / ROWS), directions, 1). The second direction begins at the last step.
#include "core/common.glslh"
#include "core/elements.glslh"
#include "core/math.glslh"

#ifndef T
#define T float
#endif
#ifndef H
#define H 8
#endif
#ifndef LANES
#define LANES 2
#endif
#ifndef LOCAL
#define LOCAL 32
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
PARAM(2, offset_gates)
PARAM(3, gates_step)  // from one step to the next
PARAM(4, gates_row)  // from one row of the batch to the next
PARAM(5, offset_weight)
PARAM(6, weight_row)
PARAM(7, offset_state)
PARAM(8, state_direction)
PARAM(9, state_row)
PARAM(10, offset_out)
PARAM(11, out_step)
PARAM(12, out_row)
#if BIAS
PARAM(13, offset_bias)
#endif
#if KIND == 3
PARAM(14, offset_before)
PARAM(15, before_direction)
PARAM(16, before_row)
PARAM(17, offset_cell)
PARAM(18, cell_direction)
PARAM(19, cell_row)
#endif
PARAM(20, most)
#if LENGTHS
PARAM(21, offset_lengths)
#endif
PARAM(22, iteration)

READONLY_BUFFER(0, gates, T)
#if VEC4
READONLY_BUFFER(1, weight, QUAD_OF(T))
#else
READONLY_BUFFER(1, weight, T)
#endif
READONLY_BUFFER(2, state, T)
#if BIAS
READONLY_BUFFER(3, bias, T)
#endif
BUFFER(3 + BIAS, out, T)
#if KIND == 3
READONLY_BUFFER(4 + BIAS, before, T)
BUFFER(5 + BIAS, cell, T)
#endif
#if KIND == 3
#define LENGTHS_BINDING (6 + BIAS)
#else
#define LENGTHS_BINDING (4 + BIAS)
#endif
#if LENGTHS
READONLY_BUFFER(LENGTHS_BINDING, lengths, int)
#endif
#define QUADS ((H + 3) / 4)
#define COLUMNS ((QUADS + LANES - 1) / LANES)  // vectors of a row of the weight in one invocation

layout(local_size_x = LOCAL, local_size_y = 1, local_size_z = 1) in;

shared vec4 states[2][ROWS][COLUMNS * LANES];

LOOPS(loop(ceil(2 * ROWS * COLUMNS * LANES, LOCAL)) + loop(most))

void main() {
    int id = int(gl_LocalInvocationIndex), unit = min(id / LANES, H - 1), lane = id % LANES;
    int row = int(WORKGROUP_ID.x) * ROWS + lane;
    int direction = int(WORKGROUP_ID.y), first = direction * GATES * H;  // row of the weight
    bool finishes = id / LANES < H && lane < ROWS && row < batches;

    QUAD_OF(T) weight[GATES][COLUMNS];
    UNROLL for (int g = 0; g < GATES; g++) {
        UNROLL for (int c = 0; c < COLUMNS; c++) {
            int k = 4 * (c * LANES + lane), at = offset_weight + (first + g * H + unit) * weight_row + k;
#if VEC4
            weight[g][c] = k < H ? buf_weight[at >> 2] : QUAD_FROM(T, vec4(0.0));
#else
            vec4 four = vec4(0.0);
            UNROLL for (int i = 0; i < 4; i++) if (k + i < H) four[i] = FLOAT_OF(T, buf_weight[at + i]);
            weight[g][c] = QUAD_FROM(T, four);
#endif
        }
    }
    for (int i = id; i < 2 * ROWS * COLUMNS * LANES; i += LOCAL) {
        states[i / (ROWS * COLUMNS * LANES)][i / (COLUMNS * LANES) % ROWS][i % (COLUMNS * LANES)] = vec4(0.0);
    }
    barrier();
    int start = iteration * most, end = min(start + most, steps), count = STEPS_OF(min(row, batches - 1));
    float before = 0.0, cell = 0.0;
    float bias[GATES];
    UNROLL for (int g = 0; g < GATES; g++) bias[g] = 0.0;
    if (finishes) {
        if (iteration == 0) {
            before = FLOAT_OF(T, buf_state[offset_state + direction * state_direction + row * state_row + unit]);
        } else {
            int earlier = step_at(start - 1, count, direction);
            before = FLOAT_OF(T, buf_out[offset_out + earlier * out_step + row * out_row + direction * H + unit]);
        }
        states[0][lane][unit >> 2][unit & 3] = before;
#if KIND == 3
        if (iteration == 0) cell = FLOAT_OF(T, buf_before[offset_before + direction * before_direction + row * before_row + unit]);
        else cell = FLOAT_OF(T, buf_cell[offset_cell + direction * cell_direction + row * cell_row + unit]);
#endif
#if BIAS
        UNROLL for (int g = 0; g < GATES; g++) bias[g] = FLOAT_OF(T, buf_bias[offset_bias + first + g * H + unit]);
#endif
    }
    barrier();

    for (int s = start; s < end; s++) {
        int t = step_at(s, count, direction), now = (s - start) & 1;
        bool runs = s < count;
        float given[GATES];
        UNROLL for (int g = 0; g < GATES; g++) {
            given[g] = finishes && runs ? FLOAT_OF(T, buf_gates[offset_gates + t * gates_step + row * gates_row + first + g * H + unit]) : 0.0;
        }
        float sum[GATES][ROWS];
        UNROLL for (int g = 0; g < GATES; g++) UNROLL for (int r = 0; r < ROWS; r++) sum[g][r] = 0.0;
        UNROLL for (int c = 0; c < COLUMNS; c++) {
            vec4 w[GATES];
            UNROLL for (int g = 0; g < GATES; g++) w[g] = FLOATS_OF(T, weight[g][c]);
            UNROLL for (int r = 0; r < ROWS; r++) {
                vec4 state = states[now][r][c * LANES + lane];
                UNROLL for (int g = 0; g < GATES; g++) sum[g][r] += dot(w[g], state);
            }
        }
        UNROLL for (int step = 0; step < LOG2_OF(LANES); step++) {
            UNROLL for (int g = 0; g < GATES; g++) {
                UNROLL for (int r = 0; r < ROWS; r++) sum[g][r] += subgroupShuffleXor(sum[g][r], uint(LANES / 2 >> step));
            }
        }
        float mine[GATES];
        UNROLL for (int g = 0; g < GATES; g++) {
            mine[g] = sum[g][0];
            UNROLL for (int r = 1; r < ROWS; r++) mine[g] = lane == r ? sum[g][r] : mine[g];
            mine[g] += bias[g];
        }
        float cell_after = cell, after = state_after(given, mine, before, cell_after);
        before = runs ? after : before;
        cell = runs ? cell_after : cell;
        if (finishes) {
            states[1 - now][lane][unit >> 2][unit & 3] = before;
            buf_out[offset_out + (runs ? t : s) * out_step + row * out_row + direction * H + unit] = ELEMENT_OF(T, runs ? before : 0.0);
        }
        barrier();
    }
#if KIND == 3
    if (finishes) {
        buf_cell[offset_cell + direction * cell_direction + row * cell_row + unit] = ELEMENT_OF(T, cell);
    }
#endif
}
