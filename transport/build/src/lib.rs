//! Stubs for tonic-rdma, generated in `build.rs`.
//!
//! tonic-prost-build does the work, and this crate changes three of its choices. The stubs use
//! `tonic_rdma::codec::ProstCodec`, which does not copy `bytes` fields. These fields have the type
//! `Bytes`. The clients' `connect` makes a `tonic_rdma::Channel`, whereas the `connect` of
//! tonic-prost-build makes a channel that uses only TCP. [`Builder`] has the methods of
//! [`tonic_prost_build::Builder`], which set all other choices.
//!
//! ```no_run
//! fn main() -> std::io::Result<()> {
//!     tonic_rdma_build::compile_protos("proto/service.proto")
//! }
//! ```
//!
//! [`compile_protos`] runs protoc. [`compile_fds`] needs no protoc: protox makes the descriptors.
//!
//! The generated code uses the crates `tonic`, `prost` and `tonic_rdma`, so a package that includes
//! it must depend on them.

use std::io;
use std::path::Path;

use prost_build::{Config, Service, ServiceGenerator};
use prost_types::FileDescriptorSet;
use syn::parse_quote;
use syn::visit_mut::{self, VisitMut};

/// The codec of generated stubs, unless [`Builder::codec_path`] names another.
const CODEC: &str = "tonic_rdma::codec::ProstCodec";

/// A builder with the defaults of this crate.
pub fn configure() -> Builder {
    Builder::from(tonic_prost_build::configure())
}

/// Generates the stubs of one `.proto` file into `OUT_DIR`. The file may import files from its own
/// folder.
///
/// # Errors
/// Protoc is missing or refuses the file, or the code cannot be written. [`compile_fds`] needs no
/// protoc.
pub fn compile_protos(proto: impl AsRef<Path>) -> io::Result<()> {
    let proto = proto.as_ref();
    // As in tonic-prost-build, an empty parent is the current folder.
    let folder = match proto.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    configure().compile_protos(&[proto], &[folder])
}

/// Generates the stubs of descriptors into `OUT_DIR`. Descriptors come for example from protox,
/// which compiles `.proto` files without protoc.
///
/// # Errors
/// The code cannot be generated or written.
pub fn compile_fds(fds: prost_types::FileDescriptorSet) -> io::Result<()> {
    configure().compile_fds(fds)
}

/// The settings of the generated code. Create a builder with [`configure`], or from a
/// [`tonic_prost_build::Builder`].
///
/// The methods are those of [`tonic_prost_build::Builder`], which documents them.
#[derive(Clone, Debug)]
pub struct Builder {
    tonic: tonic_prost_build::Builder,
    /// Whether `bytes` or `bytes_as_vec` was called. If so, only the fields that `bytes` has named
    /// are `Bytes`.
    bytes_named: bool,
}

/// Defines methods that forward to tonic-prost-build's builder.
macro_rules! passed_through {
    ($($name:ident $([$($generic:ident: $bound:path),*])? ($($argument:ident: $of:ty),*);)*) => {
        impl Builder {
            $(
                #[doc = concat!("Like [`tonic_prost_build::Builder::", stringify!($name), "`].")]
                pub fn $name$(<$($generic: $bound),*>)?(self, $($argument: $of),*) -> Self {
                    Builder { tonic: self.tonic.$name($($argument),*), ..self }
                }
            )*

            /// The names of the forwarded methods, for a test that compares them with
            /// tonic-prost-build's methods.
            #[doc(hidden)]
            pub const PASSED_THROUGH: &[&str] = &[$(stringify!($name)),*];
        }
    };
}

passed_through! {
    build_client(enable: bool);
    build_server(enable: bool);
    build_transport(enable: bool);
    out_dir(out_dir: impl AsRef<Path>);
    extern_path(proto_path: impl AsRef<str>, rust_path: impl AsRef<str>);
    field_attribute[P: AsRef<str>, A: AsRef<str>](path: P, attribute: A);
    message_attribute[P: AsRef<str>, A: AsRef<str>](path: P, attribute: A);
    enum_attribute[P: AsRef<str>, A: AsRef<str>](path: P, attribute: A);
    type_attribute[P: AsRef<str>, A: AsRef<str>](path: P, attribute: A);
    boxed[P: AsRef<str>](path: P);
    btree_map[P: AsRef<str>](path: P);
    server_mod_attribute[P: AsRef<str>, A: AsRef<str>](path: P, attribute: A);
    server_attribute[P: AsRef<str>, A: AsRef<str>](path: P, attribute: A);
    trait_attribute[P: AsRef<str>, A: AsRef<str>](path: P, attribute: A);
    client_mod_attribute[P: AsRef<str>, A: AsRef<str>](path: P, attribute: A);
    client_attribute[P: AsRef<str>, A: AsRef<str>](path: P, attribute: A);
    proto_path(proto_path: impl AsRef<str>);
    compile_well_known_types(enable: bool);
    with_extended_rust_types(enable: bool);
    emit_package(enable: bool);
    file_descriptor_set_path(path: impl AsRef<Path>);
    skip_protoc_run();
    protoc_arg[A: AsRef<str>](arg: A);
    include_file(path: impl AsRef<Path>);
    emit_rerun_if_changed(enable: bool);
    use_arc_self(enable: bool);
    generate_default_stubs(enable: bool);
    codec_path(path: impl AsRef<str>);
}

impl From<tonic_prost_build::Builder> for Builder {
    /// Keeps all settings except two: the codec becomes tonic-rdma's, and all `bytes` fields become
    /// `Bytes`. To change these, call [`codec_path`](Builder::codec_path),
    /// [`bytes`](Builder::bytes) or [`bytes_as_vec`](Builder::bytes_as_vec) on the result.
    fn from(tonic: tonic_prost_build::Builder) -> Self {
        Builder { tonic: tonic.codec_path(crate::CODEC), bytes_named: false }
    }
}

impl Builder {
    /// Generates `Bytes` only for the `bytes` fields that match this path, or the path of another
    /// call to this method, as [`tonic_prost_build::Builder::bytes`] does. The other fields are
    /// `Vec<u8>`, which are copied. If neither `bytes` nor [`bytes_as_vec`](Self::bytes_as_vec) is
    /// called, all `bytes` fields are `Bytes`.
    pub fn bytes<P: AsRef<str>>(self, path: P) -> Self {
        Builder { tonic: self.tonic.bytes(path), bytes_named: true }
    }

    /// Generates `Vec<u8>` for all `bytes` fields, as tonic-prost-build does, so that existing code
    /// with such messages compiles. Each end copies these fields once more than `Bytes` fields. To
    /// convert field by field later, use [`bytes`](Self::bytes).
    pub fn bytes_as_vec(self) -> Self {
        Builder { bytes_named: true, ..self }
    }

    /// Like [`tonic_prost_build::Builder::disable_comments`].
    pub fn disable_comments<I, S>(self, path: I) -> Self
    where
        I: IntoIterator<Item = S>,
        S: AsRef<str>,
    {
        Builder { tonic: self.tonic.disable_comments(path), ..self }
    }

    /// Like [`tonic_prost_build::Builder::skip_debug`].
    pub fn skip_debug<I, S>(self, paths: I) -> Self
    where
        I: IntoIterator<Item = S>,
        S: AsRef<str>,
    {
        Builder { tonic: self.tonic.skip_debug(paths), ..self }
    }

    /// Compiles `.proto` files with protoc and generates their stubs.
    ///
    /// # Errors
    /// Protoc is missing or refuses a file, or the code cannot be written.
    pub fn compile_protos<P: AsRef<Path>>(self, protos: &[P], includes: &[P]) -> io::Result<()> {
        self.compile_with_config(Config::new(), protos, includes)
    }

    /// Like [`compile_protos`](Self::compile_protos), with more settings of prost. A service
    /// generator in `config` is not used.
    ///
    /// # Errors
    /// The errors of [`compile_protos`](Self::compile_protos).
    pub fn compile_with_config<P: AsRef<Path>>(
        self,
        mut config: Config,
        protos: &[P],
        includes: &[P],
    ) -> io::Result<()> {
        self.messages(&mut config).compile_with_config(config, protos, includes)
    }

    /// Generates the stubs of compiled descriptors.
    ///
    /// # Errors
    /// The code cannot be generated or written.
    pub fn compile_fds(self, fds: FileDescriptorSet) -> io::Result<()> {
        self.compile_fds_with_config(fds, Config::new())
    }

    /// Like [`compile_fds`](Self::compile_fds), with more settings of prost. A service generator in
    /// `config` is not used.
    ///
    /// # Errors
    /// The errors of [`compile_fds`](Self::compile_fds).
    pub fn compile_fds_with_config(
        self,
        fds: FileDescriptorSet,
        mut config: Config,
    ) -> io::Result<()> {
        self.messages(&mut config).compile_fds_with_config(fds, config)
    }

    /// Turns the builder into a service generator for [`prost_build::Config::service_generator`].
    pub fn service_generator(self) -> Box<dyn prost_build::ServiceGenerator> {
        Box::new(Generator { inner: self.tonic.service_generator() })
    }

    /// Makes `config` generate the services, and returns the builder for the messages.
    fn messages(self, config: &mut Config) -> tonic_prost_build::Builder {
        let bytes_named = self.bytes_named;
        let messages = self.tonic.clone();
        config.service_generator(self.service_generator());
        // A builder that generates neither clients nor servers does not replace the generator in
        // `config`.
        let messages = messages.build_client(false).build_server(false);
        if bytes_named { messages } else { messages.bytes(".") }
    }
}

/// Generates the code of `inner`, with `tonic_rdma` instead of `tonic::transport`.
pub(crate) struct Generator {
    pub(crate) inner: Box<dyn ServiceGenerator>,
}

impl ServiceGenerator for Generator {
    fn generate(&mut self, service: Service, buf: &mut String) {
        let mut code = String::new();
        self.inner.generate(service, &mut code);
        // Code that does not parse is left to the compiler, which reports the position.
        match syn::parse_file(&code) {
            Ok(mut file) => {
                Transport.visit_file_mut(&mut file);
                buf.push_str(&prettyplease::unparse(&file));
            }
            Err(_) => buf.push_str(&code),
        }
    }

    fn finalize(&mut self, buf: &mut String) {
        self.inner.finalize(buf);
    }

    fn finalize_package(&mut self, package: &str, buf: &mut String) {
        self.inner.finalize_package(package, buf);
    }
}

/// Replaces the paths `tonic::transport::..` in `connect`: the channel, the endpoint and the error.
struct Transport;

impl VisitMut for Transport {
    fn visit_path_mut(&mut self, path: &mut syn::Path) {
        visit_mut::visit_path_mut(self, path);
        let mut segments = path.segments.iter();
        let is =
            |segment: Option<&syn::PathSegment>, name| segment.is_some_and(|s| s.ident == name);
        if !is(segments.next(), "tonic") || !is(segments.next(), "transport") {
            return;
        }
        let mut ours: syn::Path = parse_quote!(::tonic_rdma);
        ours.segments.extend(segments.cloned());
        *path = ours;
    }
}
