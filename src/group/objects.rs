//! Collectives and messages of objects: all values that serde can serialise. They are sent in the `MessagePack` format.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::messages::{SendOptions, Source};
use super::verbs::{AllGather, Gather, Scatter};
use super::{Error, Group};
use crate::runtime::message_status::Status;
use crate::types::Rank;

/// The maximum length of an encoded object in bytes. A receiver allocates the length that the sender announces, up to this limit.
pub const OBJECT_BYTES_MAX: usize = 1 << 30;

impl Group {
    /// Sends the root's object to all ranks, and returns the object. The other ranks' `object` is ignored.
    ///
    /// # Errors
    ///
    /// [`Error::Object`] if the object cannot be encoded or decoded, or is longer than [`OBJECT_BYTES_MAX`], or the errors of
    /// [`Group::broadcast`].
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
            return Err(Error::Object(format!("of rank {root} could not be encoded on that rank")));
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
        let lengths = self.gather_object_lengths(&encoded)?;
        let all = self.call(AllGather::new().counts(&lengths)).run_from(&encoded?)?;
        split_by_lengths(&all, &lengths).map(decode).collect()
    }

    /// Returns every rank's object in rank order on the root, and an empty vector on the other ranks.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::broadcast_object`].
    #[track_caller]
    pub fn gather_object<O: Serialize + DeserializeOwned>(
        &mut self,
        object: &O,
        root: Rank,
    ) -> Result<Vec<O>, Error> {
        self.check_root(root)?;
        let encoded = encode(object);
        let lengths = self.gather_object_lengths(&encoded)?;
        let all = self.call(Gather::to(root).counts(&lengths)).run_from(&encoded?)?;
        if self.rank == root {
            split_by_lengths(&all, &lengths).map(decode).collect()
        } else {
            Ok(Vec::new())
        }
    }

    /// Sends `objects[r]` of the root to rank r, and returns the object of this rank. The root passes one object for each
    /// rank. The other ranks' objects are ignored.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::broadcast_object`], and [`Error::InvalidCounts`] on the root if it does not pass one object
    /// for each rank.
    #[track_caller]
    pub fn scatter_object<O: Serialize + DeserializeOwned>(
        &mut self,
        objects: &[O],
        root: Rank,
    ) -> Result<O, Error> {
        self.check_root(root)?;
        let n = self.world.as_usize();
        let mut encoded = Ok(Vec::new());
        let mut lengths = vec![0u64; n];
        if self.rank == root {
            if objects.len() == n {
                let all: Result<Vec<Vec<u8>>, Error> = objects.iter().map(encode).collect();
                encoded = all.map(|all| {
                    lengths = all.iter().map(|object| object.len() as u64).collect();
                    all.concat()
                });
            } else {
                encoded = Err(Error::InvalidCounts("there must be one object for each rank"));
            }
            if encoded.is_err() {
                lengths.fill(u64::MAX);
            }
        }
        self.broadcast(&mut lengths, root)?;
        let encoded = encoded?;
        let lengths = check_lengths(&lengths)?;
        decode(&self.call(Scatter::from(root).counts(&lengths)).run_from(&encoded)?)
    }

    /// Sends an object to `to`. Only [`Group::receive_object`] can receive it.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::send`], and [`Error::Object`].
    #[track_caller]
    pub fn send_object<O: Serialize>(
        &self,
        object: &O,
        to: Rank,
        options: impl Into<SendOptions>,
    ) -> Result<(), Error> {
        self.send(&encode(object)?, to, options)
    }

    /// Receives an object, and returns the object and the status of its message.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::receive`], and [`Error::Object`].
    #[track_caller]
    pub fn receive_object<O: DeserializeOwned + 'static>(
        &self,
        source: impl Into<Source>,
        tag: impl Into<Option<u32>>,
    ) -> Result<(O, Status), Error> {
        self.receive_object_async(source, tag)?.wait()
    }

    /// Gathers the lengths of all ranks' objects. Returns an error on all ranks if any rank could not encode its object.
    #[track_caller]
    fn gather_object_lengths(&mut self, encoded: &Result<Vec<u8>, Error>) -> Result<Vec<usize>, Error> {
        let own = encoded.as_ref().map_or(u64::MAX, |bytes| bytes.len() as u64);
        check_lengths(&self.call(AllGather::new()).run_from(&[own])?)
    }
}

/// Converts the lengths of all ranks' objects. Returns an error if a rank could not encode its object: its length is then above
/// the limit.
fn check_lengths(lengths: &[u64]) -> Result<Vec<usize>, Error> {
    match lengths.iter().position(|&length| length > OBJECT_BYTES_MAX as u64) {
        Some(rank) => Err(Error::Object(format!("of rank {rank} could not be encoded on that rank"))),
        None => Ok(lengths.iter().map(|&length| length as usize).collect()),
    }
}

/// Encodes an object. Returns an error if the encoded object is too long.
pub(super) fn encode<O: Serialize>(object: &O) -> Result<Vec<u8>, Error> {
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

/// Decodes an object of [`encode`].
pub(super) fn decode<O: DeserializeOwned>(bytes: &[u8]) -> Result<O, Error> {
    rmp_serde::from_slice(bytes).map_err(|error| Error::Object(format!("cannot be decoded: {error}")))
}

/// Splits the bytes into parts of these lengths. The sum of the lengths must be the number of bytes.
fn split_by_lengths<'a>(mut all: &'a [u8], lengths: &[usize]) -> impl Iterator<Item = &'a [u8]> {
    lengths.iter().map(move |&length| {
        let (part, rest) = all.split_at(length);
        all = rest;
        part
    })
}
