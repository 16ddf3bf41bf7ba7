//! Loops of the CPU reference, compiled for the vector instructions of the current machine.

/// Declares a function whose body is compiled a second time with AVX2. Calls use the AVX2 version if the machine has AVX2. The compiler neither
/// fuses nor reorders floating-point operations, so both versions give the same bits. Type parameters are written in brackets:
///
/// ```ignore
/// wide! {
///     fn scale[S: Float](x: &mut [S], factor: S::Real) {
///         x.iter_mut().for_each(|x| *x = S::store(x.load() * factor));
///     }
/// }
/// ```
macro_rules! wide {
    ($($(#[$meta:meta])* $vis:vis fn $name:ident [$($generics:tt)*] ($($arg:ident: $type:ty),* $(,)?) $(-> $ret:ty)? $body:block)*) => { $(
        $(#[$meta])*
        $vis fn $name<$($generics)*>($($arg: $type),*) $(-> $ret)? {
            // The body is inlined into both versions.
            #[inline(always)]
            fn body<$($generics)*>($($arg: $type),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2")]
                fn avx2<$($generics)*>($($arg: $type),*) $(-> $ret)? {
                    body($($arg),*)
                }
                if is_x86_feature_detected!("avx2") {
                    // SAFETY: the feature was detected on this machine just above.
                    return unsafe { avx2($($arg),*) };
                }
            }
            body($($arg),*)
        }
    )* };
}
pub(crate) use wide;
