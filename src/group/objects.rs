//! Objects: whatever serde can serialise, as `MessagePack`, which describes itself.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::messages::{SendOptions, Source, Status};
use super::{Error, Group};
use crate::types::Rank;

/// The longest encoded object, in bytes. A rank allocates as much as another rank announces, up to this limit.
pub const OBJECT_BYTES_MAX: usize = 1 << 30;

impl Group {
    /// Sends the root's object to all ranks. The other ranks' `object` is ignored.
    ///
    /// # Errors
    ///
    /// [`Error::Object`] if it cannot be encoded or decoded, or is longer than [`OBJECT_BYTES_MAX`]; or as
    /// [`Group::broadcast`].
    #[track_caller]
    pub fn broadcast_object<O: Serialize + DeserializeOwned>(
        &mut self,
        object: &O,
        root: Rank,
    ) -> Result<O, Error> {
        self.check_root(root)?;
        // An object that cannot be encoded is everybody's error, or the others would wait for it.
        let encoded = if self.rank == root { encode(object) } else { Ok(Vec::new()) };
        let mut length = [encoded.as_ref().map_or(u64::MAX, |bytes| bytes.len() as u64)];
        self.broadcast(&mut length, root)?;
        let mut bytes = encoded?;
        if length[0] > OBJECT_BYTES_MAX as u64 {
            return Err(Error::Object(format!("of rank {root} could not be encoded there")));
        }
        bytes.resize(length[0] as usize, 0);
        self.broadcast(&mut bytes, root)?;
        decode(&bytes)
    }

    /// Gathers every rank's object, in rank order.
    ///
    /// # Errors
    ///
    /// As [`Group::broadcast_object`].
    #[track_caller]
    pub fn all_gather_object<O: Serialize + DeserializeOwned>(
        &mut self,
        object: &O,
    ) -> Result<Vec<O>, Error> {
        let encoded = encode(object);
        let lengths = self.object_lengths(&encoded)?;
        let all = self.all_gather_uneven(&encoded?, &lengths)?;
        split(&all, &lengths).map(decode).collect()
    }

    /// Gathers every rank's object, in rank order, on the root, and an empty vector on the other ranks.
    ///
    /// # Errors
    ///
    /// As [`Group::broadcast_object`].
    #[track_caller]
    pub fn gather_object<O: Serialize + DeserializeOwned>(
        &mut self,
        object: &O,
        root: Rank,
    ) -> Result<Vec<O>, Error> {
        self.check_root(root)?;
        let encoded = encode(object);
        let lengths = self.object_lengths(&encoded)?;
        let all = self.gather_uneven(&encoded?, &lengths, root)?;
        if self.rank == root { split(&all, &lengths).map(decode).collect() } else { Ok(Vec::new()) }
    }

    /// Sends the r-th of the root's objects, of which there is one for each rank, to rank r. The other ranks' objects
    /// are ignored.
    ///
    /// # Errors
    ///
    /// As [`Group::broadcast_object`].
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
                    lengths = all.iter().map(|one| one.len() as u64).collect();
                    all.concat()
                });
            } else {
                encoded = Err(Error::InvalidCounts("there is not one object for each rank"));
            }
            if encoded.is_err() {
                lengths.fill(u64::MAX);
            }
        }
        self.broadcast(&mut lengths, root)?;
        let encoded = encoded?;
        let lengths = checked(&lengths)?;
        decode(&self.scatter_uneven(&encoded, &lengths, root)?)
    }

    /// Sends an object to `to`. Only [`Group::receive_object`] can receive it.
    ///
    /// # Errors
    ///
    /// As [`Group::send`], and [`Error::Object`].
    #[track_caller]
    pub fn send_object<O: Serialize>(
        &self,
        object: &O,
        to: Rank,
        options: impl Into<SendOptions>,
    ) -> Result<(), Error> {
        self.send(&encode(object)?, to, options)
    }

    /// Receives an object, and returns it with its sender's rank.
    ///
    /// # Errors
    ///
    /// As [`Group::receive`], and [`Error::Object`].
    #[track_caller]
    pub fn receive_object<O: DeserializeOwned + 'static>(
        &self,
        source: impl Into<Source>,
        tag: impl Into<Option<u32>>,
    ) -> Result<(O, Status), Error> {
        self.receive_object_async(source, tag)?.wait()
    }

    /// All ranks' lengths; an error on all ranks if one of them has nothing to send.
    #[track_caller]
    fn object_lengths(&mut self, encoded: &Result<Vec<u8>, Error>) -> Result<Vec<usize>, Error> {
        let own = encoded.as_ref().map_or(u64::MAX, |bytes| bytes.len() as u64);
        checked(&self.all_gather_from(&[own])?)
    }
}

fn checked(lengths: &[u64]) -> Result<Vec<usize>, Error> {
    match lengths.iter().position(|&length| length > OBJECT_BYTES_MAX as u64) {
        Some(rank) => Err(Error::Object(format!("of rank {rank} could not be encoded there"))),
        None => Ok(lengths.iter().map(|&length| length as usize).collect()),
    }
}

pub(super) fn encode<O: Serialize>(object: &O) -> Result<Vec<u8>, Error> {
    let bytes = rmp_serde::to_vec_named(object)
        .map_err(|error| Error::Object(format!("cannot be encoded: {error}")))?;
    if bytes.len() > OBJECT_BYTES_MAX {
        let length = bytes.len();
        return Err(Error::Object(format!(
            "is {length} bytes long, more than the {OBJECT_BYTES_MAX} that it may be"
        )));
    }
    Ok(bytes)
}

pub(super) fn decode<O: DeserializeOwned>(bytes: &[u8]) -> Result<O, Error> {
    rmp_serde::from_slice(bytes).map_err(|error| Error::Object(format!("cannot be decoded: {error}")))
}

/// The parts of these lengths, which come to the whole.
fn split<'a>(mut all: &'a [u8], lengths: &[usize]) -> impl Iterator<Item = &'a [u8]> {
    lengths.iter().map(move |&length| {
        let (one, rest) = all.split_at(length);
        all = rest;
        one
    })
}
