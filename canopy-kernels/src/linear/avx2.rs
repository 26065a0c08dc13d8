//! The tile for AVX2 and FMA. Written in assembly because the twelve accumulators, two halves of the weights, the mask
//! and one broadcast fill all sixteen registers, and the compiler spills.
//!
//! Registers: ymm0..ymm11 accumulators (row-major, low half then high half), ymm12 outputs 8..16, ymm13 outputs 0..8,
//! ymm14 the mask of the high halves, ymm15 the broadcast input.

use std::arch::asm;

use super::pack::{Bf16Step, F32Step};
use super::tile::{Kernels, Span, TILE};

/// Loads one step of a panel into ymm13 and ymm12.
macro_rules! load_bf16 {
    ($at:literal) => {
        concat!(
            "prefetcht0 [",
            $at,
            " + 2048]\n vmovaps ymm12, [",
            $at,
            "]\n vpslld ymm13, ymm12, 16\n vandps ymm12, ymm12, ymm14\n"
        )
    };
}

/// As `load_bf16`.
macro_rules! load_f32 {
    ($at:literal) => {
        concat!("vmovaps ymm13, [", $at, "]\n vmovaps ymm12, [", $at, " + 32]\n")
    };
}

/// Adds one row's products with the loaded step.
macro_rules! row {
    ($at:literal, $low:literal, $high:literal) => {
        concat!("vbroadcastss ymm15, [", $at, "]\n", row!($low, $high))
    };
    ($low:literal, $high:literal) => {
        concat!("vfmadd231ps ymm", $low, ", ymm15, ymm13\n vfmadd231ps ymm", $high, ", ymm15, ymm12\n")
    };
}

/// Writes one pair of accumulators to an entry of the table of results.
macro_rules! store {
    ($entry:literal, $low:literal, $high:literal) => {
        concat!(
            "mov {p}, [{sums} + ",
            $entry,
            "]\n vmovups [{p}], ymm",
            $low,
            "\n vmovups [{p} + 32], ymm",
            $high,
            "\n"
        )
    };
}

/// The whole loop over k around `body`, then the accumulators to memory.
macro_rules! tile {
    ($name:ident, $step:ty, $bytes:literal, $rows:literal x $panels:literal, [$($body:expr),* $(,)?]) => {
        /// The tile that its name says.
        ///
        /// # Safety
        /// The CPU has AVX2 and FMA; `span` covers readable memory.
        #[target_feature(enable = "avx2,fma")]
        unsafe fn $name(span: &Span<$step>) {
            const { assert!($rows * $panels <= TILE) };
            let (p_stride, x_stride) = (span.panel_stride * $bytes, span.x_stride * 4);
            // SAFETY: per step the loop reads `$bytes` at each panel's pointer and 4 at each row's, `len` times, which
            // `span` covers (the caller's promise); then it writes the TILE entries of `sums`.
            unsafe {
                asm!(
                    "vpcmpeqd ymm14, ymm14, ymm14",
                    "vpslld ymm14, ymm14, 16",
                    "vxorps xmm0, xmm0, xmm0", "vxorps xmm1, xmm1, xmm1", "vxorps xmm2, xmm2, xmm2",
                    "vxorps xmm3, xmm3, xmm3", "vxorps xmm4, xmm4, xmm4", "vxorps xmm5, xmm5, xmm5",
                    "vxorps xmm6, xmm6, xmm6", "vxorps xmm7, xmm7, xmm7", "vxorps xmm8, xmm8, xmm8",
                    "vxorps xmm9, xmm9, xmm9", "vxorps xmm10, xmm10, xmm10", "vxorps xmm11, xmm11, xmm11",
                    "test {n}, {n}",
                    "jz 3f",
                    ".p2align 5",
                    "2: /* {ps} {xs} */",
                    $($body,)*
                    concat!("add {p}, ", $bytes),
                    concat!("add {q}, ", $bytes),
                    "add {x}, 4",
                    "add {y}, 4",
                    "dec {n}",
                    "jnz 2b",
                    "3:",
                    store!(0, 0, 1), store!(8, 2, 3), store!(16, 4, 5),
                    store!(24, 6, 7), store!(32, 8, 9), store!(40, 10, 11),
                    "vzeroupper",
                    p = inout(reg) span.panels => _,
                    q = inout(reg) span.panels.wrapping_byte_add(3 * p_stride) => _,
                    ps = in(reg) p_stride,
                    x = inout(reg) span.x => _,
                    y = inout(reg) span.x.wrapping_byte_add(3 * x_stride) => _,
                    xs = in(reg) x_stride,
                    n = inout(reg) span.len => _,
                    sums = in(reg) span.sums.as_ptr(),
                    out("ymm0") _, out("ymm1") _, out("ymm2") _, out("ymm3") _, out("ymm4") _, out("ymm5") _,
                    out("ymm6") _, out("ymm7") _, out("ymm8") _, out("ymm9") _, out("ymm10") _, out("ymm11") _,
                    out("ymm12") _, out("ymm13") _, out("ymm14") _, out("ymm15") _,
                    options(nostack),
                );
            }
        }
    };
}

/// All tiles of one weight dtype.
macro_rules! tiles {
    ($module:ident, $step:ty, $bytes:literal, $load:ident) => {
        mod $module {
            use super::*;
            tile!(t11, $step, $bytes, 1 x 1, [$load!("{p}"), row!("{x}", 0, 1)]);
            tile!(t12, $step, $bytes, 1 x 2, [
                $load!("{p}"), row!("{x}", 0, 1), $load!("{p} + {ps}"), row!(2, 3),
            ]);
            tile!(t13, $step, $bytes, 1 x 3, [
                $load!("{p}"), row!("{x}", 0, 1), $load!("{p} + {ps}"), row!(2, 3),
                $load!("{p} + 2*{ps}"), row!(4, 5),
            ]);
            tile!(t14, $step, $bytes, 1 x 4, [
                $load!("{p}"), row!("{x}", 0, 1), $load!("{p} + {ps}"), row!(2, 3),
                $load!("{p} + 2*{ps}"), row!(4, 5), $load!("{q}"), row!(6, 7),
            ]);
            tile!(t21, $step, $bytes, 2 x 1, [$load!("{p}"), row!("{x}", 0, 1), row!("{x} + {xs}", 2, 3)]);
            tile!(t22, $step, $bytes, 2 x 2, [
                $load!("{p}"), row!("{x}", 0, 1), row!("{x} + {xs}", 4, 5),
                $load!("{p} + {ps}"), row!(6, 7), row!("{x}", 2, 3),
            ]);
            tile!(t31, $step, $bytes, 3 x 1, [
                $load!("{p}"), row!("{x}", 0, 1), row!("{x} + {xs}", 2, 3), row!("{x} + 2*{xs}", 4, 5),
            ]);
            tile!(t32, $step, $bytes, 3 x 2, [
                $load!("{p}"), row!("{x}", 0, 1), row!("{x} + {xs}", 4, 5), row!("{x} + 2*{xs}", 8, 9),
                $load!("{p} + {ps}"), row!(10, 11), row!("{x}", 2, 3), row!("{x} + {xs}", 6, 7),
            ]);
            tile!(t41, $step, $bytes, 4 x 1, [
                $load!("{p}"), row!("{x}", 0, 1), row!("{x} + {xs}", 2, 3), row!("{x} + 2*{xs}", 4, 5),
                row!("{y}", 6, 7),
            ]);
            tile!(t51, $step, $bytes, 5 x 1, [
                $load!("{p}"), row!("{x}", 0, 1), row!("{x} + {xs}", 2, 3), row!("{x} + 2*{xs}", 4, 5),
                row!("{y}", 6, 7), row!("{y} + {xs}", 8, 9),
            ]);
            tile!(t61, $step, $bytes, 6 x 1, [
                $load!("{p}"), row!("{x}", 0, 1), row!("{x} + {xs}", 2, 3), row!("{x} + 2*{xs}", 4, 5),
                row!("{y}", 6, 7), row!("{y} + {xs}", 8, 9), row!("{y} + 2*{xs}", 10, 11),
            ]);

            /// Every tile, for a CPU with AVX2 and FMA.
            pub(in super::super) const KERNELS: Kernels<$step> = Kernels([
                &[t11, t12, t13, t14], &[t21, t22], &[t31, t32], &[t41], &[t51], &[t61],
            ]);
        }
    };
}

tiles!(bf16_tiles, Bf16Step, 32, load_bf16);
tiles!(f32_tiles, F32Step, 64, load_f32);

pub(super) use bf16_tiles::KERNELS as BF16;
pub(super) use f32_tiles::KERNELS as F32;

/// The CPU has what the tiles need.
pub(super) fn available() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
}
