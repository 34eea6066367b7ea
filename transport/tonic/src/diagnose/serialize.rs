//! Serializes the crate's own types, by the names that logs show.

use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};

use crate::{FabricKind, Path, Policy, Reason, ReasonCode, Side};

macro_rules! by_name {
    ($($type:ty)*) => { $(
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.as_str())
            }
        }
    )* };
}

by_name!(ReasonCode Path Policy FabricKind);

/// Serializes a reason, for example as `{"code":"memlock","side":"local","detail":"..."}`.
impl Serialize for Reason {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let side = match self.side() {
            Side::Local => "local",
            Side::Peer => "peer",
        };
        let mut reason = serializer.serialize_struct("Reason", 3)?;
        reason.serialize_field("code", &self.code())?;
        reason.serialize_field("side", side)?;
        reason.serialize_field("detail", self.detail())?;
        reason.end()
    }
}
