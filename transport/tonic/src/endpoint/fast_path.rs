//! Settings of the fast path: whether to use the fast path, over which fabrics, and how long to
//! wait for it.

use std::time::Duration;

use crate::endpoint::Endpoint;
use crate::path::policy::{FabricKind, Policy, distinct};

/// Maximum of [`Endpoint::fast_path_timeout`]. Any clock can add this time to the current time.
const MAX_FAST_PATH_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

impl Endpoint {
    /// Whether to use the fast path. Default is [`Policy::Auto`].
    ///
    /// The environment variable `TONIC_RDMA`, if set, overrides this setting.
    pub fn policy(mut self, policy: Policy) -> Self {
        self.shared.policy = policy;
        self
    }

    /// The fabrics that the fast path may use, in order of preference. Default is
    /// [`FabricKind::DEFAULT`]: shared memory if the server runs on the same host, RDMA otherwise.
    /// With an empty list the channel stays on TCP.
    ///
    /// Fabrics that the environment variable `TONIC_RDMA` names override this setting.
    ///
    /// ```
    /// use tonic_rdma::{Endpoint, FabricKind};
    ///
    /// // RDMA even between two processes on one host.
    /// let endpoint = Endpoint::from_static("http://10.0.0.1:50051").fabrics([FabricKind::Verbs]);
    /// ```
    pub fn fabrics(mut self, fabrics: impl IntoIterator<Item = FabricKind>) -> Self {
        self.shared.fabrics = Some(distinct(fabrics));
        self
    }

    /// Whether calls fail instead of going over TCP. `true` is the same as
    /// [`policy`](Endpoint::policy)`(Policy::Require)`, `false` as `Policy::Auto`. Shared memory
    /// satisfies the requirement as well as RDMA.
    ///
    /// With `true`, [`connect`](Endpoint::connect) waits for the fast path, and without a fast path
    /// fails with [`Cause::Required`](crate::Cause::Required) and the [`Reason`](crate::Reason). On
    /// a channel from [`connect_lazy`](Endpoint::connect_lazy), calls wait up to
    /// [`fast_path_timeout`](Endpoint::fast_path_timeout) and then fail with UNAVAILABLE and the
    /// reason. The TCP connection is made in any case, because the Offer of the fast path needs it.
    pub fn require_fast_path(self, require: bool) -> Self {
        self.policy(if require { Policy::Require } else { Policy::Auto })
    }

    /// Whether calls fail instead of going over TCP or shared memory. `true` is the same as
    /// [`policy`](Endpoint::policy)`(Policy::RequireVerbs)`, `false` as `Policy::Auto`. In all
    /// other respects, this method is like [`require_fast_path`](Endpoint::require_fast_path).
    pub fn require_rdma(self, require: bool) -> Self {
        self.policy(if require { Policy::RequireVerbs } else { Policy::Auto })
    }

    /// How long [`connect`](Endpoint::connect) waits for the fast path once TCP is connected. After
    /// this time the channel starts on TCP, and uses the fast path once it is up.
    ///
    /// Default is one second. A time of more than a day counts as a day.
    pub fn fast_path_timeout(mut self, timeout: Duration) -> Self {
        self.shared.fast_path_timeout = Some(timeout.min(MAX_FAST_PATH_TIMEOUT));
        self
    }
}
