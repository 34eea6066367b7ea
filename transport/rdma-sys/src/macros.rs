//! Macros that declare C's enums, flags and opaque structs.

/// Declares a module for each C enum, with its constants and the type of its values. With a Rust
/// enum, a value that is not declared here would be undefined behaviour.
macro_rules! enums {
    ($($(#[$doc:meta])* $name:ident: $type:ty { $($constant:ident = $value:expr,)* })*) => {$(
        $(#[$doc])*
        #[allow(missing_docs, reason = "rdma-core's manual pages have them")]
        pub mod $name {
            pub type Type = $type;
            $(pub const $constant: Type = $value;)*
            #[cfg(test)]
            pub(crate) const DECLARED: &[(&str, i64)] =
                &[$((stringify!($constant), $constant as i64),)*];
        }
    )*};
}

/// Declares a type for each C enum whose values are combined.
macro_rules! flags {
    ($($(#[$doc:meta])* $name:ident { $($constant:ident = $value:expr,)* })*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        #[repr(transparent)]
        pub struct $name(pub std::ffi::c_uint);

        #[allow(missing_docs, reason = "rdma-core's manual pages have them")]
        impl $name {
            $(pub const $constant: $name = $name($value);)*
            #[cfg(test)]
            pub(crate) const DECLARED: &[(&str, i64)] =
                &[$((stringify!($constant), $name::$constant.0 as i64),)*];
        }

        impl std::ops::BitOr for $name {
            type Output = $name;
            fn bitor(self, other: $name) -> $name {
                $name(self.0 | other.0)
            }
        }
    )*};
}

/// Declares structs that are used only through pointers.
macro_rules! opaque {
    ($($(#[$doc:meta])* $name:ident,)*) => {$(
        $(#[$doc])*
        #[derive(Debug)]
        #[repr(C)]
        pub struct $name {
            _opaque: [u8; 0],
            // The marker keeps the struct from being moved. The marker also keeps the struct from
            // being sent to or shared with another thread, unless the caller promises that this is
            // safe.
            _pinned: std::marker::PhantomData<(*mut u8, std::marker::PhantomPinned)>,
        }
    )*};
}

pub(crate) use {enums, flags, opaque};
