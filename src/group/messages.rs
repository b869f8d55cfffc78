//! Messages from one rank to another.

use std::panic::Location;
use std::sync::Arc;
use std::time::Duration;

use super::call::Site;
use super::driver::{Outcome, Submission};
use super::memory::Memory;
use super::{Error, Group, Handle};
use crate::engine::{Begin, Envelope, Pattern};
use crate::types::{ANY_TAG, Contract, DType, Element, Operation, Rank};

/// From whom a message is wanted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    /// Whoever sends one.
    Any,
    /// This rank of the group.
    Rank(Rank),
}

impl From<Rank> for Source {
    fn from(rank: Rank) -> Self {
        Self::Rank(rank)
    }
}

/// What is known of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Status {
    /// Who sent it.
    pub source: Rank,
    /// Its tag.
    pub tag: u32,
    /// The type of its elements.
    pub dtype: DType,
    /// How many there are.
    pub count: usize,
}

/// A message and what is known of it.
#[derive(Clone, PartialEq, Debug)]
pub struct Received<T> {
    /// Its elements.
    pub elements: Vec<T>,
    /// Everything else.
    pub status: Status,
}

impl Group {
    /// Sends `elements` to `to`, and returns when they have left, which may be before anybody has asked for them: short
    /// messages are stored by their receiver, long ones wait for it here.
    ///
    /// Messages with the same receiver and tag are received in the order in which they were sent. A message is received by
    /// a call that takes at least as many elements of the same type, or both ranks fail.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidPeer`], [`Error::InvalidTag`], or as [`Group::all_reduce`].
    #[track_caller]
    pub fn send<T: Element>(&mut self, elements: &[T], to: Rank, tag: u32) -> Result<(), Error> {
        self.send_async(elements.to_vec(), to, tag)?.wait().map(|_| ())
    }

    /// [`Group::send`], going on by itself; gives the buffer back.
    ///
    /// # Errors
    ///
    /// As [`Group::send`]; a failure on the way is the handle's.
    #[track_caller]
    pub fn send_async<T: Element>(
        &mut self,
        elements: Vec<T>,
        to: Rank,
        tag: u32,
    ) -> Result<Handle<Vec<T>>, Error> {
        let begin = self.message::<T>(elements.len(), tag, Location::caller());
        if tag == ANY_TAG {
            return Err(Error::InvalidTag);
        }
        let to = self.peer(to)?;
        let Some(job) = &self.job else { return Err(Error::InvalidPeer { peer: to, world: self.world }) };
        let id = job.driver.submit(begin, Submission::Send(to, Memory::owned(elements)))?;
        Ok(Handle::pending(Arc::clone(job), id, |outcome: Outcome| Ok(outcome.memory.into_elements())))
    }

    /// Receives a message into the beginning of `buffer`, which it must not exceed. `None` as a tag means any.
    ///
    /// # Errors
    ///
    /// As [`Group::send`].
    #[track_caller]
    pub fn receive<T: Element>(
        &mut self,
        buffer: &mut [T],
        source: impl Into<Source>,
        tag: impl Into<Option<u32>>,
    ) -> Result<Status, Error> {
        let tag = tag.into();
        let begin = self.message::<T>(buffer.len(), tag.unwrap_or(ANY_TAG), Location::caller());
        let pattern = self.pattern(source.into(), tag)?;
        let Some(driver) = self.driver()? else {
            return Err(Error::InvalidPeer { peer: self.rank, world: self.world });
        };
        let bytes = bytemuck::cast_slice_mut(buffer);
        let envelope = driver.run(begin, bytes, |memory| Submission::Receive(pattern, memory))?;
        envelope.map(|envelope| self.status(&envelope)).ok_or(Error::Taken)
    }

    /// Receives a message of at most `count_max` elements, going on by itself.
    ///
    /// # Errors
    ///
    /// As [`Group::send`]; a failure on the way is the handle's.
    #[track_caller]
    pub fn receive_async<T: Element>(
        &mut self,
        count_max: usize,
        source: impl Into<Source>,
        tag: impl Into<Option<u32>>,
    ) -> Result<Handle<Received<T>>, Error> {
        let tag = tag.into();
        let begin = self.message::<T>(count_max, tag.unwrap_or(ANY_TAG), Location::caller());
        let pattern = self.pattern(source.into(), tag)?;
        let Some(job) = &self.job else {
            return Err(Error::InvalidPeer { peer: self.rank, world: self.world });
        };
        let id = job.driver.submit(begin, Submission::Receive(pattern, Memory::later::<T>()))?;
        let members = Arc::clone(&self.members);
        Ok(Handle::pending(Arc::clone(job), id, move |outcome: Outcome| {
            let envelope = outcome.envelope.ok_or(Error::Taken)?;
            let status = status(&members, &envelope);
            Ok(Received { elements: outcome.memory.into_elements(), status })
        }))
    }

    /// Sends to one rank and receives from another, or the same, at once, as neighbours that exchange their borders do.
    ///
    /// # Errors
    ///
    /// As [`Group::send`].
    #[track_caller]
    pub fn send_receive<T: Element>(
        &mut self,
        (elements, to, send_tag): (&[T], Rank, u32),
        (buffer, source, receive_tag): (&mut [T], Source, Option<u32>),
    ) -> Result<Status, Error> {
        let sent = self.send_async(elements.to_vec(), to, send_tag)?;
        let status = self.receive(buffer, source, receive_tag)?;
        sent.wait()?;
        Ok(status)
    }

    /// Looks for a message that has come and that nobody has asked for yet, and leaves it where it is.
    ///
    /// # Errors
    ///
    /// As [`Group::send`].
    pub fn probe_now(
        &mut self,
        source: impl Into<Source>,
        tag: impl Into<Option<u32>>,
    ) -> Result<Option<Status>, Error> {
        self.probe_for(source, tag, Duration::ZERO)
    }

    /// Waits for a message to come that nobody has asked for yet, and leaves it where it is; `None` after `timeout`.
    ///
    /// # Errors
    ///
    /// As [`Group::send`].
    pub fn probe_for(
        &mut self,
        source: impl Into<Source>,
        tag: impl Into<Option<u32>>,
        timeout: Duration,
    ) -> Result<Option<Status>, Error> {
        let pattern = self.pattern(source.into(), tag.into())?;
        let Some(driver) = self.driver()? else { return Ok(None) };
        let until = driver.now() + timeout;
        Ok(driver.probe(pattern, until)?.map(|envelope| self.status(&envelope)))
    }

    fn message<T: Element>(&self, count: usize, tag: u32, site: Site) -> Begin {
        let contract = Contract {
            operation: Operation::Message,
            dtype: T::DTYPE,
            reduction: None,
            algorithm: self.algorithm_of::<T>(Operation::Message, count),
            root: Rank::ZERO,
            count: count as u64,
            layout: tag,
        };
        Begin { group: self.id, contract, timeout: self.timeout, site }
    }

    /// The rank in the job of another member.
    fn peer(&self, peer: Rank) -> Result<Rank, Error> {
        if peer == self.rank || !self.world.contains(peer) {
            return Err(Error::InvalidPeer { peer, world: self.world });
        }
        Ok(self.members[peer.index()])
    }

    fn pattern(&self, source: Source, tag: Option<u32>) -> Result<Pattern, Error> {
        let source = match source {
            Source::Any => None,
            Source::Rank(rank) => Some(self.peer(rank)?),
        };
        Ok(Pattern { group: self.id, source, tag })
    }

    fn status(&self, envelope: &Envelope) -> Status {
        status(&self.members, envelope)
    }
}

fn status(members: &[Rank], envelope: &Envelope) -> Status {
    let position = members.iter().position(|&member| member == envelope.source);
    Status {
        source: Rank::new(position.unwrap_or_default() as u32),
        tag: envelope.tag,
        dtype: envelope.contract.dtype,
        count: envelope.contract.count as usize,
    }
}
