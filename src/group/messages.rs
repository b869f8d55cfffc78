//! Point-to-point messages.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use super::state::SharedJob;
use super::{Buffer, Error, Group, Handle, Input, OwnedBuffer, join};
use crate::engine::{Envelope, OperationRequest, Pattern, SendMode};
use crate::runtime::driver::{OperationOutput, Submission};
use crate::runtime::error::Status;
use crate::runtime::memory::{self, Memory};
use crate::types::{ANY_TAG, Contract, Element, Rank, Site, WorldSize};

/// The sender of a message to receive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    /// Any rank.
    Any,
    /// This rank of the group.
    Rank(Rank),
}

impl From<Rank> for Source {
    fn from(rank: Rank) -> Self {
        Self::Rank(rank)
    }
}

/// The tag and the mode of a send. A number converts to a standard send with this tag: `group.send(&elements, to, 7)`.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct SendOptions {
    /// The tag.
    pub tag: u32,
    /// The event that completes the send.
    pub mode: SendMode,
}

impl SendOptions {
    /// Returns the options of a synchronous send, which is complete only when a receive has matched the message.
    pub fn synchronous(tag: u32) -> Self {
        Self { tag, mode: SendMode::Synchronous }
    }
}

impl From<u32> for SendOptions {
    fn from(tag: u32) -> Self {
        Self { tag, mode: SendMode::Standard }
    }
}

/// A message and its status.
#[derive(Clone, PartialEq, Debug)]
pub struct Received<T> {
    /// The elements of the message.
    pub elements: Vec<T>,
    /// The sender, tag, type and length of the message.
    pub status: Status,
}

/// Sends and receives a group's messages from several threads at the same time. It gives access to all methods of
/// [`Group`] that take `&self`. These methods do not wait for a collective of another thread.
///
/// A messenger keeps the group's connections open. Its operations have the maximum time that the group had at its creation.
#[derive(Clone)]
pub struct Messenger(Arc<Group>);

impl Deref for Messenger {
    type Target = Group;

    fn deref(&self) -> &Group {
        &self.0
    }
}

impl Group {
    /// Creates a messenger of this group.
    pub fn messenger(&self) -> Messenger {
        Messenger(Arc::new(self.without_memory()))
    }

    /// Sends elements to rank `to`, and returns when the elements have left this rank. The send of a short message may return
    /// before the receive is posted, because the receiver stores the message. The send of a long message waits for the
    /// receive. A message from a rank to itself is copied, so its send returns at once.
    ///
    /// With [`SendOptions::synchronous`], this method returns only after a receive has matched the message, which costs a round
    /// trip. If a rank sends such a message to itself, the receive must already be posted, or must be in another thread.
    ///
    /// Messages with the same receiver and tag are received in the order in which they were sent. If the receive is for
    /// fewer elements or for another type, the job fails.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidPeer`], [`Error::InvalidTag`], [`Error::NotContiguous`], or the errors of [`Group::all_reduce`].
    #[track_caller]
    pub fn send<B: Input + ?Sized>(
        &self,
        elements: &B,
        to: Rank,
        options: impl Into<SendOptions>,
    ) -> Result<(), Error> {
        let site = Site::here();
        let elements = elements.elements()?;
        let (request, to) = self.send_request::<B::Element>(elements.len(), (to, options.into()), site)?;
        let bytes: &[u8] = bytemuck::cast_slice(elements);
        self.message_job()?.driver.send(request, to, bytes)
    }

    /// Starts a [`Group::send`] and returns its handle, which returns the buffer.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::send`]. The handle returns later failures.
    #[track_caller]
    pub fn send_async<B: OwnedBuffer>(
        &self,
        elements: B,
        to: Rank,
        options: impl Into<SendOptions>,
    ) -> Result<Handle<B>, Error> {
        let count = elements.as_ref().len();
        let (request, to) = self.send_request::<B::Element>(count, (to, options.into()), Site::here())?;
        let job = self.message_job()?;
        if job.driver.try_send_directly(&request, to, bytemuck::cast_slice(elements.as_ref())) {
            return Ok(Handle::ready(Ok(elements)));
        }
        let id = job.driver.submit(request, Submission::Send(to, Memory::owned_input(elements)))?;
        let make_result = |output: OperationOutput| output.memory.into_owned().ok_or(Error::Taken);
        Ok(Handle::pending(Arc::clone(job), id, make_result))
    }

    /// Receives a message into the beginning of `buffer`, which must be long enough. A tag of `None` accepts any tag.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::send`], and [`Error::NothingSent`] if only this rank could send the message and has not.
    #[track_caller]
    pub fn receive<B: Buffer + ?Sized>(
        &self,
        buffer: &mut B,
        source: impl Into<Source>,
        tag: impl Into<Option<u32>>,
    ) -> Result<Status, Error> {
        let elements = buffer.elements_mut()?;
        let room = elements.len();
        self.receive_elements(elements, self.pattern(source, tag)?, room, Site::here())
    }

    /// Receives as [`Group::receive`] does, but a message that is longer than the buffer does not fail the job. Such a message
    /// is discarded, and this rank gets [`Error::Truncated`]. The group can still be used, as MPI programs expect.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::receive`], and [`Error::Truncated`].
    #[track_caller]
    pub fn receive_fitting<B: Buffer + ?Sized>(
        &self,
        buffer: &mut B,
        source: impl Into<Source>,
        tag: impl Into<Option<u32>>,
    ) -> Result<Status, Error> {
        self.receive_elements(buffer.elements_mut()?, self.pattern(source, tag)?, usize::MAX, Site::here())
    }

    /// Receives a message into the beginning of `elements`. If it has more than `count_max` elements, the job fails.
    fn receive_elements<T: Element>(
        &self,
        elements: &mut [T],
        pattern: Pattern,
        count_max: usize,
        site: Site,
    ) -> Result<Status, Error> {
        let room = elements.len();
        let request = self.message_request::<T>(count_max, pattern.tag, site);
        let driver = &self.message_job()?.driver;
        if self.accepts_only_own_messages(pattern) && driver.probe(pattern, driver.now())?.is_none() {
            return Err(Error::NothingSent);
        }
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(elements);
        let adapt = |memory: Memory| memory.or_allocated_for::<T>(count_max);
        let envelope = driver.receive(request, pattern, bytes, adapt)?.ok_or(Error::Taken)?;
        check_length(status(&self.members, &envelope), room)
    }

    /// Asynchronous [`Group::receive_fitting`]; the handle returns the buffer and the status if the message fits.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::send`]. The handle returns later failures and [`Error::Truncated`].
    #[track_caller]
    pub fn receive_fitting_async<B: OwnedBuffer>(
        &self,
        buffer: B,
        source: impl Into<Source>,
        tag: impl Into<Option<u32>>,
    ) -> Result<Handle<(B, Status)>, Error> {
        self.receive_into_owned(buffer, self.pattern(source, tag)?, usize::MAX, Site::here())
    }

    /// Asynchronously receives a message of at most `count_max` elements into new memory of the length of the message.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::send`]. The handle returns later failures.
    #[track_caller]
    pub fn receive_async<T: Element>(
        &self,
        count_max: usize,
        source: impl Into<Source>,
        tag: impl Into<Option<u32>>,
    ) -> Result<Handle<Received<T>>, Error> {
        let pattern = self.pattern(source, tag)?;
        self.submit_receive(Vec::<T>::new(), pattern, count_max, Site::here(), |memory, status| {
            Ok(Received { elements: memory.into_owned().ok_or(Error::Taken)?, status })
        })
    }

    /// Asynchronously receives a message into the beginning of `buffer`; the handle returns the buffer and the status.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::send`]. The handle returns later failures.
    #[track_caller]
    pub fn receive_into_async<B: OwnedBuffer>(
        &self,
        buffer: B,
        source: impl Into<Source>,
        tag: impl Into<Option<u32>>,
    ) -> Result<Handle<(B, Status)>, Error> {
        let room = buffer.as_ref().len();
        self.receive_into_owned(buffer, self.pattern(source, tag)?, room, Site::here())
    }

    /// Begins to receive a message of at most `count_max` elements, which is an error if it does not fit into `buffer`.
    fn receive_into_owned<B: OwnedBuffer>(
        &self,
        buffer: B,
        pattern: Pattern,
        count_max: usize,
        site: Site,
    ) -> Result<Handle<(B, Status)>, Error> {
        let room = buffer.as_ref().len();
        self.submit_receive(buffer, pattern, count_max, site, move |memory, status| {
            let status = check_length(status, room)?;
            Ok((memory.into_owned().ok_or(Error::Taken)?, status))
        })
    }

    /// Begins to receive a message of at most `count_max` elements, in new memory if it does not fit into `buffer`.
    fn submit_receive<B: OwnedBuffer, R>(
        &self,
        buffer: B,
        pattern: Pattern,
        count_max: usize,
        site: Site,
        make_result: impl FnOnce(Memory, Status) -> Result<R, Error> + Send + 'static,
    ) -> Result<Handle<R>, Error> {
        let request = self.message_request::<B::Element>(count_max, pattern.tag, site);
        let job = self.message_job()?;
        let memory = Memory::owned(buffer).or_allocated_for::<B::Element>(count_max);
        let id = job.driver.submit(request, Submission::Receive(pattern, memory))?;
        let members = Arc::clone(&self.members);
        Ok(Handle::pending(Arc::clone(job), id, move |output: OperationOutput| {
            let envelope = output.envelope.ok_or(Error::Taken)?;
            make_result(output.memory, status(&members, &envelope))
        }))
    }

    /// Sends a message to one rank, and at the same time receives a message from another rank or the same rank (`MPI_Sendrecv`).
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::send`] and [`Group::receive`].
    #[track_caller]
    pub fn send_receive<I, B>(
        &self,
        (elements, to, send_tag): (&I, Rank, u32),
        (buffer, source, receive_tag): (&mut B, Source, Option<u32>),
    ) -> Result<Status, Error>
    where
        I: Input + ?Sized,
        B: Buffer<Element = I::Element> + ?Sized,
    {
        let site = Site::here();
        let (elements, buffer) = (elements.elements()?, buffer.elements_mut()?);
        let (send_request, to) =
            self.send_request::<I::Element>(elements.len(), (to, send_tag.into()), site)?;
        // Check the arguments of the receive before anything is sent.
        let pattern = self.pattern(source, receive_tag)?;
        let driver = &self.message_job()?.driver;
        let bytes: &[u8] = bytemuck::cast_slice(elements);
        let room = buffer.len();
        let mut receive = || self.receive_elements(buffer, pattern, room, site);
        if driver.try_send_directly(&send_request, to, bytes) {
            return receive();
        }
        memory::lend(bytes, |memory| {
            let (core, sent) =
                driver.begin(driver.now(), send_request, Submission::Send(to, memory), true)?;
            drop(core);
            let received = receive();
            // The send must end even if the receive has failed, because the send uses the borrowed elements.
            driver.wait_for_borrowed(driver.core(), sent, driver.now()).unwrap_or(Err(Error::Taken))?;
            received
        })
    }

    /// Waits until a message has arrived that no receive has matched (`MPI_Probe`). The message is not received. Returns `None`
    /// after `timeout`, which may be zero (`MPI_Iprobe`), or at once if only this rank could send the message and has not.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::send`].
    pub fn probe(
        &self,
        source: impl Into<Source>,
        tag: impl Into<Option<u32>>,
        timeout: Duration,
    ) -> Result<Option<Status>, Error> {
        let pattern = self.pattern(source, tag)?;
        let driver = &self.message_job()?.driver;
        let timeout = if self.accepts_only_own_messages(pattern) { Duration::ZERO } else { timeout };
        let until = driver.now().saturating_add(timeout);
        Ok(driver.probe(pattern, until)?.map(|envelope| status(&self.members, &envelope)))
    }

    /// Returns the arguments with which the engine begins a send, and the receiver's rank in the world.
    fn send_request<T: Element>(
        &self,
        count: usize,
        (to, SendOptions { tag, mode }): (Rank, SendOptions),
        site: Site,
    ) -> Result<(OperationRequest, Rank), Error> {
        if tag == ANY_TAG {
            return Err(Error::InvalidTag);
        }
        let request = self.message_request::<T>(count, Some(tag), site);
        Ok((OperationRequest { mode, ..request }, self.world_rank(to)?))
    }

    fn message_request<T: Element>(&self, count: usize, tag: Option<u32>, site: Site) -> OperationRequest {
        // A message cannot be longer than the address space.
        let count = count.min(isize::MAX as usize / size_of::<T>()) as u64;
        let contract = Contract::message(T::DTYPE, count, tag.unwrap_or(ANY_TAG));
        OperationRequest::new(self.id, contract, self.timeout, site)
    }

    fn world_rank(&self, peer: Rank) -> Result<Rank, Error> {
        match self.members.get(peer.index()) {
            Some(&member) => Ok(member),
            None => Err(Error::InvalidPeer { peer, world: self.world }),
        }
    }

    fn pattern(&self, source: impl Into<Source>, tag: impl Into<Option<u32>>) -> Result<Pattern, Error> {
        let (source, tag) = match source.into() {
            Source::Any => (None, tag.into()),
            Source::Rank(rank) => (Some(self.world_rank(rank)?), tag.into()),
        };
        if tag == Some(ANY_TAG) {
            return Err(Error::InvalidTag);
        }
        Ok(Pattern { group: self.id, source, tag })
    }

    fn accepts_only_own_messages(&self, pattern: Pattern) -> bool {
        let own = self.members[self.rank.index()];
        self.world == WorldSize::ONE || pattern.source == Some(own)
    }

    /// Returns the job that carries messages. In a world of one rank, the first call creates it.
    #[inline]
    fn message_job(&self) -> Result<&Arc<SharedJob>, Error> {
        self.job.as_ref().map_or_else(|| self.own_message_job(), Ok)
    }

    fn own_message_job(&self) -> Result<&Arc<SharedJob>, Error> {
        self.check_abort()?;
        if let Some(job) = self.self_job.get() {
            return Ok(job);
        }
        let job = join::create_self_job()?;
        Ok(self.self_job.get_or_init(|| Arc::new(job)))
    }
}

fn check_length(status: Status, room: usize) -> Result<Status, Error> {
    if status.count <= room { Ok(status) } else { Err(Error::Truncated { status, room }) }
}

/// Returns the status of a message. The envelope names a rank of the world, and the status names a rank of the group.
#[inline]
fn status(members: &[Rank], envelope: &Envelope) -> Status {
    let position = members.iter().position(|&member| member == envelope.source);
    Status {
        source: Rank::new(position.unwrap_or_default() as u32),
        tag: envelope.tag,
        dtype: envelope.contract.dtype,
        count: envelope.contract.count as usize,
    }
}
