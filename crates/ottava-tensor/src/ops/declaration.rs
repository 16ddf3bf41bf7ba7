//! Declares the kernels of an op by the macro [`kernels!`], once in the file that launches them.
//!
//! ```ignore
//! kernels! {
//!     static SOURCE = { file: "scale", constants: [CHUNK], variants: launch::STORAGE };
//!     table fp8(Activation) = {
//!         file: "scale", headers: ["destination.cuh"], constants: [], variants: quantize::VARIANTS,
//!         (Activation::SwiGlu) => [],
//!         (Activation::ClampedSwiGlu) => [CLAMPED],
//!     };
//!     kernel scale, scale_back(y: *mut X, x: *const X, factor: f32, #[OFFSET] offset: i32);
//!     kernel scale_codes(x: *const X; Destination);
//! }
//! ```
//!
//! - `static` declares a [`Source`](crate::cuda::Source): the common header, `headers`, and the kernel `file` of this folder. `macros` are defined
//!   as 1 in the kernel file; `needs` are [`Feature`](crate::Feature)s of a GPU; `constants` are Rust constants in scope that become macros of the
//!   kernel file, in addition to `TILE`; `variants` are the defines that launches choose from.
//! - `table` declares a function from a key to sources that differ in their macros. If a row for a key is missing, the code does not compile.
//! - `kernel` declares kernels and their parameters, with the types of the kernel file. `kernel::scale(y, x, factor, offset)` checks types
//!   and returns the [`Entry`](crate::cuda::Entry). A parameter after `#[OFFSET]` exists only if this macro is defined, and is an `Option` in Rust.
//!   A struct after the semicolon is appended by [`produce`](super::quantize::produce) or `produce_rows`.
//!
//! `signatures.rs` compares the declared kernels with the kernel files. The build script collects the sources of all folders for
//! [`kernels`](super::kernels()).

use crate::Tensor;
use crate::cuda::{Arg, Defines, KernelModule, Kind, Source, TensorMap};

macro_rules! kernels {
    (
        $(static $static:ident = { $($single:tt)* };)*
        $(table $table:ident($key:ty) = { $($rows:tt)* };)*
        $(kernel $($name:ident),+ ($($parameters:tt)*);)+
    ) => {
        $($crate::ops::declaration::source! { @static $static { $($single)* } })*
        $($crate::ops::declaration::sources! { @table $table($key) { $($rows)* } })*

        /// Returns the modules of the sources above, one for each variant.
        pub(in crate::ops) fn modules() -> Vec<$crate::cuda::KernelModule> {
            let mut all = Vec::new();
            $($crate::ops::declaration::source! { @modules all $static { $($single)* } })*
            $($crate::ops::declaration::sources! { @modules all $table { $($rows)* } })*
            all
        }

        static SIGNATURES: &[$crate::cuda::Signature] = &[$($crate::cuda::Signature {
            names: &[$(stringify!($name)),+],
            parameters: $crate::ops::declaration::parameters! { $($parameters)* },
        }),+];

        /// The kernels above: their names and arguments.
        #[allow(dead_code, reason = "`RowKernels` and `Producer` name further kernels of the same parameters")]
        #[allow(clippy::too_many_arguments, reason = "as many as the kernel has parameters")]
        mod kernel {
            #[allow(unused_imports, reason = "parameters may all be numbers")]
            use $crate::ops::declaration::types::*;
            $($crate::ops::declaration::entries! { [$($name)+] ($($parameters)*) })+
        }
    };
}
pub(in crate::ops) use kernels;

macro_rules! source {
    (@static $static:ident {
        file: $file:literal, $(headers: $headers:tt,)? $(macros: $macros:tt,)? $(needs: $needs:tt,)? $(constants: $constants:tt,)?
        variants: $variants:expr
    }) => {
        pub(in crate::ops) static $static: $crate::cuda::Source = $crate::ops::declaration::source! {
            @value $file [$($headers)?] [$($macros)?] [$($needs)?] [$($constants)?]
        };
    };
    (@modules $all:ident $static:ident {
        file: $file:literal, $(headers: $headers:tt,)? $(macros: $macros:tt,)? $(needs: $needs:tt,)? $(constants: $constants:tt,)?
        variants: $variants:expr
    }) => {
        $all.extend($crate::ops::declaration::modules_of(&$static, $variants));
    };
    (@value $file:literal [$([$($header:literal),*])?] [$([$($macro:ident),*])?] [$([$($need:ident),*])?] [$([$($constant:ident),*])?]) => {
        $crate::cuda::Source {
            name: $file,
            text: concat!(
                $($("#define ", stringify!($macro), " 1\n",)*)?
                include_str!("../common.cuh"),
                "\n",
                $($(include_str!(concat!("../", $header)), "\n",)*)?
                include_str!(concat!($file, ".cu"))
            ),
            needs: &[$($($crate::Feature::$need),*)?],
            constants: &[
                ("TILE", $crate::ops::launch::TILE as i64),
                $($((stringify!($constant), $constant as i64)),*)?
            ],
            macros: &[$($(stringify!($macro)),*)?],
            signatures: SIGNATURES,
        }
    };
}
pub(in crate::ops) use source;

macro_rules! sources {
    (@table $table:ident($key:ty) {
        file: $file:literal, headers: $headers:tt, constants: $constants:tt, variants: $variants:expr,
        $(($($row:tt)+) => $macros:tt,)+
    }) => {
        fn $table(key: $key) -> &'static $crate::cuda::Source {
            match key {
                $($($row)+ => {
                    static SOURCE: $crate::cuda::Source =
                        $crate::ops::declaration::source! { @value $file [$headers] [$macros] [] [$constants] };
                    &SOURCE
                })+
            }
        }
    };
    (@modules $all:ident $table:ident {
        file: $file:literal, headers: $headers:tt, constants: $constants:tt, variants: $variants:expr,
        $(($($row:tt)+) => $macros:tt,)+
    }) => {
        for source in [$($table($($row)+)),+] {
            $all.extend($crate::ops::declaration::modules_of(source, $variants));
        }
    };
}
pub(in crate::ops) use sources;

macro_rules! parameters {
    ($($(#[$only_with:ident])? $name:ident: $type:ty),* $(; $($struct:ident),+)?) => {
        &[
            $($crate::ops::declaration::parameter! { $(#[$only_with])? stringify!($name), $type },)*
            $($($crate::ops::declaration::parameter! { "", $struct }),+)?
        ]
    };
}
pub(in crate::ops) use parameters;

macro_rules! parameter {
    (#[$only_with:ident] $name:expr, $type:ty) => {
        $crate::cuda::Parameter {
            only_with: Some(stringify!($only_with)),
            ..$crate::ops::declaration::parameter! { $name, $type }
        }
    };
    ($name:expr, $type:ty) => {{
        #[allow(unused_imports, reason = "the type may be a number")]
        use $crate::ops::declaration::{Type, types::*};
        $crate::cuda::Parameter { name: $name, of: stringify!($type), kind: <$type as Type>::KIND, only_with: None }
    }};
}
pub(in crate::ops) use parameter;

macro_rules! entries {
    ([] $parameters:tt) => {};
    ([$name:ident $($more:ident)*] $parameters:tt) => {
        $crate::ops::declaration::entries! { @one $name $parameters }
        $crate::ops::declaration::entries! { [$($more)*] $parameters }
    };
    (@one $name:ident ($($(#[$only_with:ident])? $parameter:ident: $type:ty),* $(; $($struct:ident),+)?)) => {
        pub(in crate::ops) fn $name(
            $($parameter: $crate::ops::declaration::passed! { $(#[$only_with])? $type }),*
        ) -> $crate::cuda::Entry {
            let mut args = Vec::new();
            $($crate::ops::declaration::pass! { args, $(#[$only_with])? $parameter })*
            $crate::cuda::Entry { name: stringify!($name), args }
        }
    };
}
pub(in crate::ops) use entries;

macro_rules! passed {
    (#[$only_with:ident] $type:ty) => { Option<impl $crate::ops::declaration::Passed<$type>> };
    ($type:ty) => { impl $crate::ops::declaration::Passed<$type> };
}
pub(in crate::ops) use passed;

macro_rules! pass {
    ($args:ident, #[$only_with:ident] $parameter:ident) => {
        if let Some(argument) = $parameter {
            $crate::ops::declaration::Passed::pass(argument, &mut $args);
        }
    };
    ($args:ident, $parameter:ident) => {
        $crate::ops::declaration::Passed::pass($parameter, &mut $args);
    };
}
pub(in crate::ops) use pass;

/// Returns the modules of a source, one for each variant.
pub(super) fn modules_of(source: &'static Source, variants: &[Defines]) -> impl Iterator<Item = KernelModule> {
    variants.iter().map(move |&defines| KernelModule { source, defines })
}

/// A type of kernel parameters.
pub(in crate::ops) trait Type {
    const KIND: Kind;
}

/// A value that a kernel takes as a parameter of type `T`.
pub(in crate::ops) trait Passed<T> {
    /// Appends the value to the arguments.
    fn pass(self, args: &mut Vec<Arg>);
}

/// An address that a kernel reads; 0 is the null pointer.
#[derive(Clone, Copy, Default)]
pub(in crate::ops) struct Address(pub u64);

/// An address that a kernel writes; 0 is the null pointer.
#[derive(Clone, Copy, Default)]
pub(in crate::ops) struct AddressMut(pub u64);

impl<T> Type for *const T {
    const KIND: Kind = Kind::Pointer;
}

impl<T> Type for *mut T {
    const KIND: Kind = Kind::Pointer;
}

impl<T> Passed<*const T> for Address {
    fn pass(self, args: &mut Vec<Arg>) {
        args.push(Arg::Ptr(self.0));
    }
}

impl<T> Passed<*mut T> for AddressMut {
    fn pass(self, args: &mut Vec<Arg>) {
        args.push(Arg::Ptr(self.0));
    }
}

impl<T> Passed<*const T> for &Tensor {
    fn pass(self, args: &mut Vec<Arg>) {
        args.push(Arg::Ptr(self.device_ptr()));
    }
}

impl<T> Passed<*mut T> for &mut Tensor {
    fn pass(self, args: &mut Vec<Arg>) {
        args.push(Arg::Ptr(self.device_ptr_mut()));
    }
}

/// `None` passes a null pointer.
impl<T> Passed<*const T> for Option<&Tensor> {
    fn pass(self, args: &mut Vec<Arg>) {
        args.push(Arg::Ptr(self.map_or(0, Tensor::device_ptr)));
    }
}

/// `None` passes a null pointer.
impl<T> Passed<*mut T> for Option<&mut Tensor> {
    fn pass(self, args: &mut Vec<Arg>) {
        args.push(Arg::Ptr(self.map_or(0, Tensor::device_ptr_mut)));
    }
}

/// Implements numeric parameters, and the Rust types that convert to them.
macro_rules! numbers {
    ($($type:ty: $kind:ident $arg:ident, $($from:ty: |$value:ident| $converted:expr),+;)+) => {$(
        impl Type for $type {
            const KIND: Kind = Kind::$kind;
        }
        $(impl Passed<$type> for $from {
            fn pass(self, args: &mut Vec<Arg>) {
                let $value = self;
                args.push(Arg::$arg($converted));
            }
        })+
    )+};
}

numbers! {
    i32: I32 I32, i32: |x| x, usize: |x| x as i32, bool: |x| x.into();
    u32: U32 U32, u32: |x| x, usize: |x| x as u32;
    i64: I64 I64, i64: |x| x, usize: |x| x as i64;
    u64: U64 U64, u64: |x| x, usize: |x| x as u64;
    f32: F32 F32, f32: |x| x, f64: |x| x as f32;
    f64: F64 U64, f64: |x| x.to_bits();
}

impl Type for TensorMap {
    const KIND: Kind = Kind::Map;
}

impl Passed<TensorMap> for TensorMap {
    fn pass(self, args: &mut Vec<Arg>) {
        args.push(Arg::Map(self));
    }
}

/// A struct that is passed as 64-bit words.
pub(in crate::ops) trait Struct {}

impl<T: Struct> Type for T {
    const KIND: Kind = Kind::Struct;
}

impl<T: Struct> Passed<T> for Vec<Arg> {
    fn pass(self, args: &mut Vec<Arg>) {
        args.extend(self);
    }
}

/// Packs two 32-bit members of a struct into one word.
pub(in crate::ops) fn pack(low: u32, high: u32) -> Arg {
    Arg::U64(u64::from(low) | u64::from(high) << 32)
}

/// The types of kernel files, with the names that they have in kernel files.
#[allow(non_camel_case_types, clippy::upper_case_acronyms)]
pub(in crate::ops) mod types {
    pub(in crate::ops) use crate::cuda::TensorMap;

    macro_rules! elements {
        ($($name:ident)+) => { $(pub(in crate::ops) enum $name {})+ };
    }
    elements! { CODE FROM G KV M RowDraw Scalars TO W WORD X Y bf16 e4m3 f16 float2 int2 uint4 void }

    macro_rules! structs {
        ($($name:ident)+) => { $(
            pub(in crate::ops) enum $name {}
            impl super::Struct for $name {}
        )+ };
    }
    structs! { Arguments CastParts Destination Parts Routing Sides WithActivation }
}
