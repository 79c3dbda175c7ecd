//! The choice of vector instructions at run time, and the macros that compile a function for each of them.

use std::sync::OnceLock;

/// A set of vector instructions that kernels can use. Levels are ordered from least to most capable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SimdLevel {
    /// Arrays of numbers, vectorized by the compiler.
    Portable,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512 F.
    Avx512,
    /// AVX-512 F, and AVX-512 BF16 for products of bf16.
    Avx512Bf16,
}

/// Returns the widest vector instructions of this processor, or narrower ones if the environment variable
/// `PLIMSOLL_VECTORS` names them.
pub fn simd_level() -> SimdLevel {
    static LEVEL: OnceLock<SimdLevel> = OnceLock::new();
    *LEVEL.get_or_init(|| {
        let limit = match std::env::var("PLIMSOLL_VECTORS").as_deref() {
            Ok("portable") => SimdLevel::Portable,
            Ok("avx2") => SimdLevel::Avx2,
            Ok("avx512") => SimdLevel::Avx512,
            _ => SimdLevel::Avx512Bf16,
        };
        widest().min(limit)
    })
}

#[cfg(target_arch = "x86_64")]
fn widest() -> SimdLevel {
    let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    let avx512 = avx2 && is_x86_feature_detected!("avx512f");
    match (avx512 && is_x86_feature_detected!("avx512bf16"), avx512, avx2) {
        (true, ..) => SimdLevel::Avx512Bf16,
        (_, true, _) => SimdLevel::Avx512,
        (.., true) => SimdLevel::Avx2,
        _ => SimdLevel::Portable,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn widest() -> SimdLevel {
    SimdLevel::Portable
}

/// Defines `fn name<T: Real>(…)` (or `T: Float`) with a body over `T` and `V: Vector<T::Wide>`. The body is compiled
/// for each width of vectors, and calls use the widest one that the processor supports. Types after `V` are further
/// type parameters with the same wide type.
macro_rules! vectorized {
    ($(#[$meta:meta])* $vis:vis fn $name:ident<$T:ident, $V:ident>($($rest:tt)*) $($more:tt)*) => {
        vectorized! { $(#[$meta])* $vis fn $name<$T: Real, $V>($($rest)*) $($more)* }
    };
    ($(#[$meta:meta])* $vis:vis fn $name:ident<$T:ident: $bound:ident, $V:ident $(, $X:ident)*>($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name<$T: $crate::cpu::kernels::simd::$bound $(, $X: $crate::cpu::kernels::simd::Real<Wide = $T::Wide>)*>($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body<$T: $crate::cpu::kernels::simd::$bound, $V: $crate::cpu::kernels::simd::Vector<$T::Wide> $(, $X: $crate::cpu::kernels::simd::Real<Wide = $T::Wide>)*>($($arg: $ty),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            {
                use $crate::cpu::kernels::simd::{SimdLevel, simd_level};
                #[target_feature(enable = "avx512f,avx2,fma")]
                fn avx512<$T: $crate::cpu::kernels::simd::$bound $(, $X: $crate::cpu::kernels::simd::Real<Wide = $T::Wide>)*>($($arg: $ty),*) $(-> $ret)? {
                    body::<$T, <$T::Wide as $crate::cpu::kernels::simd::Float>::Avx512 $(, $X)*>($($arg),*)
                }
                #[target_feature(enable = "avx2,fma")]
                fn avx2<$T: $crate::cpu::kernels::simd::$bound $(, $X: $crate::cpu::kernels::simd::Real<Wide = $T::Wide>)*>($($arg: $ty),*) $(-> $ret)? {
                    body::<$T, <$T::Wide as $crate::cpu::kernels::simd::Float>::Avx2 $(, $X)*>($($arg),*)
                }
                match simd_level() {
                    // SAFETY: `simd_level` has checked that this processor has these features.
                    SimdLevel::Avx512 | SimdLevel::Avx512Bf16 => return unsafe { avx512::<$T $(, $X)*>($($arg),*) },
                    // SAFETY: `simd_level` has checked that this processor has these features.
                    SimdLevel::Avx2 => return unsafe { avx2::<$T $(, $X)*>($($arg),*) },
                    SimdLevel::Portable => {}
                }
            }
            body::<$T, <$T::Wide as $crate::cpu::kernels::simd::Float>::Portable $(, $X)*>($($arg),*)
        }
    };
}
pub(crate) use vectorized;

/// Defines a function over `D: Dot`. It is compiled for each method to multiply pairs, and calls use the best one of
/// this processor.
macro_rules! vectorized_dot {
    ($(#[$meta:meta])* $vis:vis fn $name:ident<$D:ident $(, $O:ident)?>($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name$(<$O: Real<Wide = f32>>)?($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body<$D: Dot $(, $O: Real<Wide = f32>)?>($($arg: $ty),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            {
                use $crate::cpu::kernels::simd::{Float, SimdLevel, NativeDot, simd_level};
                #[target_feature(enable = "avx512f,avx512bf16,avx2,fma")]
                fn native$(<$O: Real<Wide = f32>>)?($($arg: $ty),*) $(-> $ret)? {
                    body::<NativeDot $(, $O)?>($($arg),*)
                }
                #[target_feature(enable = "avx512f,avx2,fma")]
                fn avx512$(<$O: Real<Wide = f32>>)?($($arg: $ty),*) $(-> $ret)? {
                    body::<$crate::cpu::kernels::simd::WidenedDot<<f32 as Float>::Avx512> $(, $O)?>($($arg),*)
                }
                #[target_feature(enable = "avx2,fma")]
                fn avx2$(<$O: Real<Wide = f32>>)?($($arg: $ty),*) $(-> $ret)? {
                    body::<$crate::cpu::kernels::simd::WidenedDot<<f32 as Float>::Avx2> $(, $O)?>($($arg),*)
                }
                match simd_level() {
                    // SAFETY: `simd_level` has checked that this processor has these features.
                    SimdLevel::Avx512Bf16 => return unsafe { native($($arg),*) },
                    // SAFETY: `simd_level` has checked that this processor has these features.
                    SimdLevel::Avx512 => return unsafe { avx512($($arg),*) },
                    // SAFETY: `simd_level` has checked that this processor has these features.
                    SimdLevel::Avx2 => return unsafe { avx2($($arg),*) },
                    SimdLevel::Portable => {}
                }
            }
            body::<$crate::cpu::kernels::simd::WidenedDot<<f32 as $crate::cpu::kernels::simd::Float>::Portable> $(, $O)?>($($arg),*)
        }
    };
}
pub(crate) use vectorized_dot;
