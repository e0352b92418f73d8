#version 450
#extension GL_GOOGLE_include_directive : enable
// softmax(scale * q k^T + mask) v in one pass with a running maximum, in float. An invocation takes
// RQ queries.
//
// Buffers, parameters and macros: attention_io.glslh. More macros:
//   SG  subgroup size (8), = local_size_x. The subgroup loads SG keys or values together and shares
//     them by shuffles. 1: no subgroup operations; local_size_x is LX (8).
//   RQ  queries per invocation (1)
//   WY  subgroups per workgroup (1)
// Grid: (ceil(S / (LX * RQ * WY)), Hq, B), where LX is SG, or 8 if SG is 1.
#include "core/common.glslh"
#ifndef SG
#define SG 8
#endif
#ifndef RQ
#define RQ 1
#endif
#ifndef WY
#define WY 1
#endif
#if SG > 1
#define LX SG
#define KEYS SG
#define LANE int(gl_SubgroupInvocationID)
#define SHARE(v, i) subgroupShuffle(v, uint(i))
#else
#ifndef LX
#define LX 8
#endif
#define KEYS 4
#endif

#include "attention/attention_io.glslh"
WRITEONLY_BUFFER(OUT_BINDING, out, QUAD_OF(T_OUT))
layout(local_size_x = LX, local_size_y = WY, local_size_z = 1) in;

#if MASKED && !EXACT_BOUNDS
uint seen_keys[RQ];  // of a step, for the queries of this invocation: a bit for each
#define SCORE_OF(dot_product, base, r, t0, i) \
    ((seen_keys[r] & (1u << i)) != 0u ? seen_score(dot_product, base, row0 + r * LX, t0 + i, seen[r]) : UNSEEN)

// Finds the keys from t0 on that the queries see. Whether a query of the subgroup sees one.
bool find_seen_keys(int row0, int t0) {
    uint any = 0u;
    UNROLL for (int r = 0; r < RQ; r++) {
        seen_keys[r] = 0u;
        UNROLL for (int i = 0; i < KEYS; i++) seen_keys[r] |= is_seen(row0 + r * LX, t0 + i) ? 1u << i : 0u;
        any |= seen_keys[r];
    }
#if SG > 1
    UNROLL for (int step = 0; step < LOG2_OF(SG); step++) any |= subgroupShuffleXor(any, 1u << step);
#endif
    return any != 0u;
}
#else
#define SCORE_OF(dot_product, base, r, t0, i) masked_score(dot_product, base, row0 + r * LX, t0 + i, seen[r])
#endif

// The keys that some query of this subgroup, from `first` on, may see: from x on, before y. `seen` has
// those of the queries of this invocation.
ivec2 step_keys(int first, ivec2 seen[RQ]) {
#if LIMITS
    ivec2 ends = ivec2(T, 0);
#if SG > 1
    UNROLL for (int r = 0; r < RQ; r++) {
        if (seen[r].x < seen[r].y) ends = ivec2(min(ends.x, seen[r].x), max(ends.y, seen[r].y));
    }
    UNROLL for (int step = 0; step < LOG2_OF(SG); step++) {
        ends.x = min(ends.x, subgroupShuffleXor(ends.x, 1u << step));
        ends.y = max(ends.y, subgroupShuffleXor(ends.y, 1u << step));
    }
#else
    for (int r = 0; r < LX * RQ; r++) {
        ivec2 keys = keys_of(first + r);
        if (keys.x < keys.y) ends = ivec2(min(ends.x, keys.x), max(ends.y, keys.y));
    }
#endif
    return ends;
#else
    return ivec2(0, keys_of(first + LX * RQ - 1).y);
#endif
}

#if BOUNDED && MASKED && !EXACT_BOUNDS
#define STEP_LOOPS 3
#elif BOUNDED || (MASKED && !EXACT_BOUNDS)
#define STEP_LOOPS 1
#else
#define STEP_LOOPS 0
#endif

// The first step from key t0 on in which a query of this subgroup, from `first` on, may see a key. Loops
// of their own, since software devices run through both sides of a branch.
int next_step(int t0, int keys, int first, int row0) {
#if BOUNDED
    while (t0 < keys && !may_see(first, LX * RQ, t0, KEYS)) t0 += KEYS;
#endif
#if MASKED && !EXACT_BOUNDS
    while (t0 < keys && !find_seen_keys(row0, t0)) {
        t0 += KEYS;
#if BOUNDED
        while (t0 < keys && !may_see(first, LX * RQ, t0, KEYS)) t0 += KEYS;
#endif
    }
#endif
    return t0;
}

// A key or value of the subgroup is shared by 4 shuffles.
UNROLLED_CODE((D4 + DV4) * KEYS * RQ * 4)
// Steps over the keys, those that are left out, and the last test of each loop that finds the next one.
LOOPS(loop(ceil(T, KEYS), 1 + 2 * STEP_LOOPS) + STEP_LOOPS)
#if LIMITS && SG == 1
LOOPS(loop(LX * RQ))
#endif

void main() {
    begin_functions();
    int head = int(WORKGROUP_ID.y), batch = int(WORKGROUP_ID.z), key_head = head / group;
    int base_q = offset_q + batch * q_batch + head * q_head;
    int base_k = offset_k + batch * k_batch + key_head * k_head;
    int base_v = offset_v + batch * v_batch + key_head * v_head;
    int base_o = offset_o + batch * o_batch + head * o_head;
    int base_mask = offset_mask + batch * mask_batch + head * mask_head;
    int first = int(WORKGROUP_ID.x * WY + gl_LocalInvocationID.y) * (LX * RQ);
    int row0 = first + int(gl_LocalInvocationID.x);

    vec4 q[RQ][D4];
    vec4 acc[RQ][DV4];
    float highest[RQ], total[RQ];
    ivec2 seen[RQ];
    UNROLL for (int r = 0; r < RQ; r++) {
        UNROLL for (int d = 0; d < D4; d++) q[r][d] = READ4_Q(base_q + min(row0 + r * LX, S - 1) * q_row + 4 * d);
        UNROLL for (int d = 0; d < DV4; d++) acc[r][d] = vec4(0.0);
        highest[r] = UNSEEN;
        total[r] = 0.0;
        seen[r] = keys_of(row0 + r * LX);
    }
    ivec2 ends = step_keys(first, seen);
    int keys = ends.y;
    for (int t0 = next_step(ends.x, keys, first, row0); t0 < keys; t0 = next_step(t0 + KEYS, keys, first, row0)) {
        float score[RQ][KEYS];
        UNROLL for (int r = 0; r < RQ; r++) {
            UNROLL for (int i = 0; i < KEYS; i++) score[r][i] = 0.0;
        }
#if SG > 1
        int mine = row_of(min(t0 + LANE, T - 1));
#else
        int rows[KEYS];
        UNROLL for (int i = 0; i < KEYS; i++) rows[i] = row_of(min(t0 + i, T - 1));
#endif
        UNROLL for (int d = 0; d < D4; d++) {
#if SG > 1
            vec4 loaded = READ4_K(base_k + mine * k_row + 4 * d);
#endif
            UNROLL for (int i = 0; i < KEYS; i++) {
#if SG > 1
                vec4 key = SHARE(loaded, i);
#else
                vec4 key = READ4_K(base_k + rows[i] * k_row + 4 * d);
#endif
                UNROLL for (int r = 0; r < RQ; r++) score[r][i] += dot(q[r][d], key);
            }
        }
        UNROLL for (int r = 0; r < RQ; r++) {
            float top = highest[r];
            UNROLL for (int i = 0; i < KEYS; i++) {
                score[r][i] = SCORE_OF(score[r][i], base_mask, r, t0, i);
                top = max(top, score[r][i]);
            }
            float shrink = weight(highest[r], top);
            highest[r] = top;
            total[r] *= shrink;
            UNROLL for (int i = 0; i < KEYS; i++) {
                score[r][i] = weight(score[r][i], top);
                total[r] += score[r][i];
            }
            UNROLL for (int d = 0; d < DV4; d++) acc[r][d] *= shrink;
        }
        UNROLL for (int d = 0; d < DV4; d++) {
#if SG > 1
            vec4 loaded = READ4_V(base_v + mine * v_row + 4 * d);
#endif
            UNROLL for (int i = 0; i < KEYS; i++) {
#if SG > 1
                vec4 value = SHARE(loaded, i);
#else
                vec4 value = READ4_V(base_v + rows[i] * v_row + 4 * d);
#endif
                UNROLL for (int r = 0; r < RQ; r++) acc[r][d] += score[r][i] * value;
            }
        }
    }
    UNROLL for (int r = 0; r < RQ; r++) {
        int row = row0 + r * LX;
        float over = over_total(total[r], highest[r], int(WORKGROUP_ID.z), int(WORKGROUP_ID.y), row);
        if (row < S) {
            UNROLL for (int d = 0; d < DV4; d++) {
                buf_out[(base_o + row * o_row) / 4 + d] = QUAD_FROM(T_OUT, acc[r][d] * over);
            }
        }
    }
}
