#version 450
#extension GL_GOOGLE_include_directive : enable
// 2-D convolution of NCHW images in any precision, an invocation for each element of the result. The
// weight is [y, x, in, out]. With `spread`, the channel says which pixel of a block the element is.
//
// START  what the sum starts with; `o` is the channel before spreading
#include "elementwise/map.glslh"
#ifndef START
#define START 0.0
#endif
#ifdef BARE
const int i1 = 0, i2 = 0, i3 = 0, w_size_0 = 1, w_size_1 = 1, w_size_2 = 1, w_size_3 = 1, r_size_1 = 1;
const int groups = 1, spread_y = 1, spread_x = 1, stride_y = 1, stride_x = 1;
const int pad_y = 0, pad_x = 0, dilation_y = 1, dilation_x = 1;
#undef X
#define X(n, c, h, w) buf_x[w]
#define W(y, x, c, o) buf_x[o]
#else
LOOPS(loop(w_size_0, loop(w_size_1, loop(w_size_2))))
#endif

MAP_BEGIN
int o = (i2 % spread_y * spread_x + i3 % spread_x) * r_size_1 + i1, g = o / (w_size_3 / groups);
r = START;
for (int y = 0; y < w_size_0; y++) {
    int h = i2 / spread_y * stride_y - pad_y + y * dilation_y;
    if (h < 0 || h >= x_size_2) continue;
    for (int x = 0; x < w_size_1; x++) {
        int v = i3 / spread_x * stride_x - pad_x + x * dilation_x;
        if (v < 0 || v >= x_size_3) continue;
        for (int c = 0; c < w_size_2; c++) r += X(i0, g * w_size_2 + c, h, v) * W(y, x, c, o);
    }
}
MAP_END
