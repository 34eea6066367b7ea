//! Generates clients that connect with tonic-rdma.

use prost_build::{Service, ServiceGenerator};
use syn::visit_mut::{self, VisitMut};
use syn::{Path, parse_quote};

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
    fn visit_path_mut(&mut self, path: &mut Path) {
        visit_mut::visit_path_mut(self, path);
        let mut segments = path.segments.iter();
        let is =
            |segment: Option<&syn::PathSegment>, name| segment.is_some_and(|s| s.ident == name);
        if !is(segments.next(), "tonic") || !is(segments.next(), "transport") {
            return;
        }
        let mut ours: Path = parse_quote!(::tonic_rdma);
        ours.segments.extend(segments.cloned());
        *path = ours;
    }
}
