//! Collectives of objects: all values that serde can serialise. They are sent in the `MessagePack` format.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::verbs::AllGather;
use super::{Error, Group};
use crate::types::Rank;

/// The maximum length of an encoded object in bytes. A receiver allocates the length that the sender announces, up to this limit.
pub const OBJECT_BYTES_MAX: usize = 1 << 30;

impl Group {
    /// Sends the root's object to all ranks, and returns the object. The other ranks' `object` is ignored.
    ///
    /// # Errors
    ///
    /// [`Error::Object`] if the object cannot be encoded or decoded, or is too long, or the errors of [`Group::broadcast`].
    #[track_caller]
    pub fn broadcast_object<O: Serialize + DeserializeOwned>(
        &mut self,
        object: &O,
        root: Rank,
    ) -> Result<O, Error> {
        self.check_root(root)?;
        // If the object cannot be encoded, all ranks must return an error. Otherwise the other ranks would wait for the object.
        let encoded = if self.rank == root { encode(object) } else { Ok(Vec::new()) };
        let mut length = [encoded.as_ref().map_or(u64::MAX, |bytes| bytes.len() as u64)];
        self.broadcast(&mut length, root)?;
        let mut bytes = encoded?;
        if length[0] > OBJECT_BYTES_MAX as u64 {
            return Err(not_encoded(root.index()));
        }
        bytes.resize(length[0] as usize, 0);
        self.broadcast(&mut bytes, root)?;
        decode(&bytes)
    }

    /// Returns every rank's object, in rank order.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::broadcast_object`].
    #[track_caller]
    pub fn all_gather_object<O: Serialize + DeserializeOwned>(
        &mut self,
        object: &O,
    ) -> Result<Vec<O>, Error> {
        let encoded = encode(object);
        let own = encoded.as_ref().map_or(u64::MAX, |bytes| bytes.len() as u64);
        let lengths = self.call(AllGather::new()).run_from(&[own])?;
        if let Some(rank) = lengths.iter().position(|&length| length > OBJECT_BYTES_MAX as u64) {
            return Err(not_encoded(rank));
        }
        let lengths: Vec<usize> = lengths.into_iter().map(|length| length as usize).collect();
        let all = self.call(AllGather::new().counts(&lengths)).run_from(&encoded?)?;
        let mut rest = &all[..];
        let objects = lengths.into_iter().map(|length| decode(rest.split_off(..length).unwrap_or_default()));
        objects.collect()
    }
}

/// The error on the other ranks if an object could not be encoded on `rank`.
fn not_encoded(rank: usize) -> Error {
    Error::Object(format!("of rank {rank} could not be encoded on that rank"))
}

fn encode<O: Serialize>(object: &O) -> Result<Vec<u8>, Error> {
    let bytes = rmp_serde::to_vec_named(object)
        .map_err(|error| Error::Object(format!("cannot be encoded: {error}")))?;
    if bytes.len() > OBJECT_BYTES_MAX {
        let length = bytes.len();
        return Err(Error::Object(format!(
            "has {length} bytes, more than the limit of {OBJECT_BYTES_MAX} bytes"
        )));
    }
    Ok(bytes)
}

fn decode<O: DeserializeOwned>(bytes: &[u8]) -> Result<O, Error> {
    rmp_serde::from_slice(bytes).map_err(|error| Error::Object(format!("cannot be decoded: {error}")))
}
