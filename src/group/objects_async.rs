//! Asynchronous collectives of objects. They send point-to-point messages. A message contains its length, so the ranks need no
//! separate operation to exchange lengths.
//!
//! These messages belong to an internal group ([`OBJECTS_GROUP_BIT`]), so that no receive of the program takes one of them. All
//! ranks begin the collectives of objects in the same order, and the number of a collective is the tag of its messages.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::messages::{Received, SendOptions, Source};
use super::objects::{OBJECT_BYTES_MAX, decode, encode};
use super::{Error, Group, Handle};
use crate::engine::{OperationRequest, Pattern};
use crate::runtime::message_status::Status;
use crate::types::{ANY_TAG, OBJECTS_GROUP_BIT, Rank, Site};

impl Group {
    /// Asynchronous [`Group::broadcast_object`]. The root sends the object to each of the other ranks.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::broadcast_object`]. The handle returns later failures, and the error if the object
    /// cannot be encoded. All ranks must call this method, or all ranks must call [`Group::broadcast_object`].
    #[track_caller]
    pub fn broadcast_object_async<O: Serialize + DeserializeOwned + 'static>(
        &mut self,
        object: &O,
        root: Rank,
    ) -> Result<Handle<O>, Error> {
        self.check_root(root)?;
        let sends = if self.rank == root { self.same_for_each_rank(&encode(object)) } else { Vec::new() };
        let handle = self.exchange_objects(sends, vec![root], Site::here())?;
        Ok(handle.and_then(|mut objects| objects.pop().ok_or(Error::Taken)))
    }

    /// Asynchronous [`Group::all_gather_object`]. Each rank sends its object to each of the other ranks.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::broadcast_object_async`].
    #[track_caller]
    pub fn all_gather_object_async<O: Serialize + DeserializeOwned + 'static>(
        &mut self,
        object: &O,
    ) -> Result<Handle<Vec<O>>, Error> {
        let sends = self.same_for_each_rank(&encode(object));
        self.exchange_objects(sends, self.world.ranks().collect(), Site::here())
    }

    /// Asynchronous [`Group::gather_object`].
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::broadcast_object_async`].
    #[track_caller]
    pub fn gather_object_async<O: Serialize + DeserializeOwned + 'static>(
        &mut self,
        object: &O,
        root: Rank,
    ) -> Result<Handle<Vec<O>>, Error> {
        self.check_root(root)?;
        let sources = if self.rank == root { self.world.ranks().collect() } else { Vec::new() };
        self.exchange_objects(vec![(root, encode(object))], sources, Site::here())
    }

    /// Asynchronous [`Group::scatter_object`].
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::broadcast_object_async`].
    #[track_caller]
    pub fn scatter_object_async<O: Serialize + DeserializeOwned + 'static>(
        &mut self,
        objects: &[O],
        root: Rank,
    ) -> Result<Handle<O>, Error> {
        self.check_root(root)?;
        let sends = if self.rank == root { self.encode_for_each_rank(objects) } else { Vec::new() };
        let handle = self.exchange_objects(sends, vec![root], Site::here())?;
        Ok(handle.and_then(|mut objects| objects.pop().ok_or(Error::Taken)))
    }

    /// Sends `objects[r]` of this rank to rank r. Each rank passes one object for each rank. Returns the objects that this
    /// rank has received, in rank order of the senders.
    ///
    /// # Errors
    ///
    /// [`Error::Object`] if an object cannot be encoded, on this rank and on the receiver of the object.
    /// [`Error::InvalidCounts`] if there is not one object for each rank. The errors of [`Group::all_reduce`].
    #[track_caller]
    pub fn all_to_all_object<O: Serialize + DeserializeOwned + 'static>(
        &mut self,
        objects: &[O],
    ) -> Result<Vec<O>, Error> {
        self.all_to_all_object_async(objects)?.wait()
    }

    /// Asynchronous [`Group::all_to_all_object`].
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_to_all_object`]. The handle returns later failures, and the error if an object
    /// cannot be encoded.
    #[track_caller]
    pub fn all_to_all_object_async<O: Serialize + DeserializeOwned + 'static>(
        &mut self,
        objects: &[O],
    ) -> Result<Handle<Vec<O>>, Error> {
        let sends = self.encode_for_each_rank(objects);
        self.exchange_objects(sends, self.world.ranks().collect(), Site::here())
    }

    /// Asynchronous [`Group::send_object`].
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::send_object`]. The handle returns later failures.
    #[track_caller]
    pub fn send_object_async<O: Serialize>(
        &self,
        object: &O,
        to: Rank,
        options: impl Into<SendOptions>,
    ) -> Result<Handle<()>, Error> {
        Ok(self.send_async(encode(object)?, to, options)?.and_then(|_| Ok(())))
    }

    /// Asynchronous [`Group::receive_object`].
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::receive_object`]. The handle returns later failures.
    #[track_caller]
    pub fn receive_object_async<O: DeserializeOwned + 'static>(
        &self,
        source: impl Into<Source>,
        tag: impl Into<Option<u32>>,
    ) -> Result<Handle<(O, Status)>, Error> {
        let received = self.receive_async::<u8>(OBJECT_BYTES_MAX, source, tag)?;
        Ok(received.and_then(|Received { elements, status }| Ok((decode(&elements)?, status))))
    }

    /// Returns the same encoded object once for each rank.
    fn same_for_each_rank(&self, encoded: &Result<Vec<u8>, Error>) -> Vec<EncodedForRank> {
        self.world.ranks().map(|rank| (rank, encoded.clone())).collect()
    }

    /// Encodes one object for each rank.
    fn encode_for_each_rank<O: Serialize>(&self, objects: &[O]) -> Vec<EncodedForRank> {
        let has_one_for_each = objects.len() == self.world.as_usize();
        let object = |rank: Rank| match objects.get(rank.index()).filter(|_| has_one_for_each) {
            Some(object) => encode(object),
            None => Err(Error::InvalidCounts("there must be one object for each rank")),
        };
        self.world.ranks().map(|rank| (rank, object(rank))).collect()
    }

    /// Sends the objects in `sends` to their ranks, and receives an object from each rank in `sources`. If an object could not be
    /// encoded, its receiver gets an empty message instead, so that the receiver does not wait. No encoded object is empty.
    fn exchange_objects<O: DeserializeOwned + 'static>(
        &mut self,
        sends: Vec<EncodedForRank>,
        sources: Vec<Rank>,
        site: Site,
    ) -> Result<Handle<Vec<O>>, Error> {
        let (tag, group) = (self.object_operations, self.id | OBJECTS_GROUP_BIT);
        self.object_operations = (self.object_operations + 1) % ANY_TAG;
        let mut failure = Ok(());
        let mut parts = Vec::with_capacity(sends.len() + sources.len());
        for (to, encoded) in sends {
            let bytes = encoded.unwrap_or_else(|error| {
                failure = Err(error);
                Vec::new()
            });
            let request =
                OperationRequest { group, ..self.send_request::<u8>(bytes.len(), tag.into(), site)? };
            parts.push(self.submit_send(request, bytes, to)?.and_then(|_| Ok(None)));
        }
        for &source in &sources {
            let source = Source::Rank(source);
            let (request, pattern) =
                self.receive_request_and_pattern::<u8>(OBJECT_BYTES_MAX, source, Some(tag), site)?;
            let (request, pattern) = (OperationRequest { group, ..request }, Pattern { group, ..pattern });
            let received = self.submit_receive::<u8>(request, pattern)?;
            parts.push(received.and_then(|received| Ok(Some(received.elements))));
        }
        Ok(Handle::joined(parts, move |parts: Vec<Option<Vec<u8>>>| {
            failure?;
            sources
                .iter()
                .zip(parts.iter().flatten())
                .map(|(&source, bytes)| decode_from(source, bytes))
                .collect()
        }))
    }
}

/// A rank, and the encoded object for this rank. The error says why the object could not be encoded.
type EncodedForRank = (Rank, Result<Vec<u8>, Error>);

/// Decodes an object that rank `source` has sent. An empty message means that `source` could not encode the object.
fn decode_from<O: DeserializeOwned>(source: Rank, bytes: &[u8]) -> Result<O, Error> {
    if bytes.is_empty() {
        return Err(Error::Object(format!("of rank {source} could not be encoded on that rank")));
    }
    decode(bytes)
}
