//! A file to transfer.

use super::origin::{Origin, blocking};
use super::target::Target;
use crate::attributes::Attributes;
use crate::failure::Failure;
use crate::pb::Entry;
use crate::store::MIN_FILE;

/// A file to transfer.
#[derive(Clone)]
pub(crate) struct Item {
    pub(crate) origin: Origin,
    pub(crate) target: Target,
    /// Size in bytes, if known.
    pub(crate) size: Option<u64>,
    /// Mode and modification time to set at the target.
    pub(crate) attributes: Attributes,
    /// CRC32C, if it is known without reading the file.
    pub(crate) crc32c: Option<u32>,
    /// The target server's entry under this name, if the listing was requested.
    pub(crate) there: Option<Entry>,
}

impl Item {
    /// The item's name in the store, for messages and bars.
    pub(super) fn shown(&self) -> String {
        match (&self.target, &self.origin) {
            (Target::Object(_, name), _) | (_, Origin::Object(_, name)) => name.to_string(),
            (target, _) => target.to_string(),
        }
    }
}

/// Whether the target already has the content. If so, updates the target's mode and modification
/// time.
pub(super) async fn is_there(item: &Item, size: Option<u64>) -> Result<bool, Failure> {
    let Some(size) = size else { return Ok(false) };
    let (attributes, least) = match &item.target {
        Target::Object(..) => {
            let Some(there) = item.there.as_ref().filter(|there| there.size == size) else {
                return Ok(false);
            };
            let Some(theirs) = there.crc32c else { return Ok(false) };
            let ours = match (&item.origin, item.crc32c) {
                (Origin::Object(..), known) => known,
                _ => Some(item.origin.file_digest().await?)
                    .filter(|it| it.size == size)
                    .map(|it| it.crc32c),
            };
            if ours != Some(theirs) {
                return Ok(false);
            }
            (there.attributes.map(Attributes::from).unwrap_or_default(), MIN_FILE)
        }
        Target::File(place) => {
            let here = place.clone();
            let look = blocking(move || here.look(size))
                .await
                .map_err(|error| place.cannot_write(&error))?;
            match look {
                Some((attributes, digest))
                    if digest.size == size && Some(digest.crc32c) == item.crc32c =>
                {
                    (attributes, 0)
                }
                _ => return Ok(false),
            }
        }
    };
    if !item.attributes.are(&attributes, least) {
        item.target.set_attributes(item.attributes).await?;
    }
    Ok(true)
}
