#version 450
#extension GL_GOOGLE_include_directive : enable
#if defined(COOPMAT) && COOPMAT
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_EXT_shader_explicit_arithmetic_types_int8 : require
#endif
#pragma purevk precise
// 2-D convolution of int8 images as an implicit matmul. Rows are output pixels, and columns are
// output channels. K runs over the taps and the input channels of a group, channels fastest, as in
// the weight [OC, KH * KW * IC].
//
// Buffers, macros: qmatmul_io.glslh (ACT 1, BITS 8). Parameters: qconv2d_params.glslh. Tiles:
// qtile.glslh, or with FRAGMENTS 1 qtile_coopmat.glslh.
//   ALIGNED  16: IC is a multiple of 16; 4: a multiple of 4. Both need pixels, groups of channels
//            and the offset of the input at multiples of 4 bytes. 1: anything. With FRAGMENTS 1,
//            ALIGNED is 16, and pixels, groups of channels, the offset of the input, and rows of the
//            weight are at multiples of 16 bytes.
// Grid: (ceil(OC / TILE_N), ceil(batches * OH * OW / TILE_M), groups of channels)
#include "core/common.glslh"
#include "quantized/qtile_sizes.glslh"
#ifndef ALIGNED
#define ALIGNED 1
#endif

#include "quantized/qconv2d_params.glslh"

int first_in, first_out, depth, k_now;
int row_y[A_SLOTS], row_x[A_SLOTS], row_at[A_SLOTS];

void a_row(int slot, int m) {
    m = min(m, batches * OH * OW - 1);
    int image_row = m / OW, image = image_row / OH;
    row_y[slot] = image_row - image * OH;
    row_x[slot] = m - image_row * OW;
    row_at[slot] = image * H;
}

void a_column(int k) { k_now = k; }

// The element of channel 0 of a tap's pixel; -1 if the pixel is outside of the image.
int tap_at(int slot, int tap) {
    int ky = tap / KW, kx = tap - ky * KW;
    int y = tap_of(row_y[slot], ky, stride_y, pad_y, dilation_y, H), x = tap_of(row_x[slot], kx, stride_x, pad_x, dilation_x, W);
    return y < 0 || x < 0 ? -1 : ((row_at[slot] + y) * W + x) * pixel_a + offset_a + first_in;
}

#if WIDE
// Only whole loads of 16.
#elif ALIGNED > 1
uint a_word(int slot, int k) {
    if (k >= depth) return 0u;
    int tap = k / IC, at = tap_at(slot, tap);
    return at < 0 ? outside() : buf_a[(at + k - tap * IC) >> 2];
}
#else
uint a_byte(int slot, int k) {
    if (k >= depth) return 0u;
    int tap = k / IC, at = tap_at(slot, tap);
    if (at < 0) return uint(x_zero) & 0xffu;
    at += k - tap * IC;
    return (buf_a[at >> 2] >> ((at & 3) * 8)) & 0xffu;
}

uint a_word(int slot, int k) {
    return a_byte(slot, k) | (a_byte(slot, k + 1) << 8) | (a_byte(slot, k + 2) << 16) | (a_byte(slot, k + 3) << 24);
}
#endif

ivec4 a_load(int slot) {
#if ALIGNED == 16
    if (k_now >= depth) return ivec4(0);
    int tap = k_now / IC, at = tap_at(slot, tap);
    if (at < 0) return ivec4(outside());
#if WIDE
    return ivec4(buf_a[(at + k_now - tap * IC) >> 4]);
#else
    at = (at + k_now - tap * IC) >> 2;
    return ivec4(buf_a[at], buf_a[at + 1], buf_a[at + 2], buf_a[at + 3]);
#endif
#else
    return ivec4(a_word(slot, k_now), a_word(slot, k_now + 4), a_word(slot, k_now + 8), a_word(slot, k_now + 12));
#endif
}

ivec4 b_load(int n, int k) {
    int row = offset_w + (first_out + min(n, OC - 1)) * ldw, last = ldw - 1, at = k >> 2;
#if WIDE
    return ivec4(buf_w[(row + min(at, last - 3)) >> 2]);
#else
    return ivec4(buf_w[row + min(at, last)], buf_w[row + min(at + 1, last)], buf_w[row + min(at + 2, last)],
                 buf_w[row + min(at + 3, last)]);
#endif
}

#define RESULT4 ivec4
void put_result(ivec4 v, int m, int n) {
    n += first_out;
    if (m < batches * OH * OW && n < column_end) store4(finish_sums(v, m, n), offset_o + m * channels_out + n, m, n);
}

#if FRAGMENTS
#include "quantized/qtile_coopmat.glslh"
#else
#include "quantized/qtile.glslh"
#endif

LOOPS(loop(ceil(KH * KW * IC, 16), 2))

void main() {
    int channel_group = int(WORKGROUP_ID.z);
    first_in = channel_group * IC;
    first_out = channel_group * OC;
    column_end = first_out + OC;
    depth = KH * KW * IC;
    tile_multiply(int(WORKGROUP_ID.y) * TILE_M, int(WORKGROUP_ID.x) * TILE_N, depth);
}
