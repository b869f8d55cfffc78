//! Point-to-point messages.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use super::{Buffer, Error, Group, Handle, Input, OwnedBuffer, SharedJob, join};
use crate::engine::{Envelope, OperationRequest, Pattern, SendMode};
use crate::runtime::driver::{OperationOutput, Submission};
use crate::runtime::memory::{self, Memory};
use crate::runtime::message_status::Status;
use crate::types::{ANY_TAG, Contract, Element, Operation, Rank, Site, WorldSize};

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
    /// Returns the options of a synchronous send with this tag. The send is complete only when a receive has matched the
    /// message.
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
/// A messenger keeps the group's connections open, as the group itself does. Its operations have the maximum time that
/// the group had when the messenger was created.
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
        Messenger(Arc::new(Self {
            job: self.job.clone(),
            id: self.id,
            members: Arc::clone(&self.members),
            rank: self.rank,
            world: self.world,
            local_rank_and_size: self.local_rank_and_size,
            machine_numbers: Arc::clone(&self.machine_numbers),
            timeout: self.timeout,
            object_operations: 0,
            self_job: Arc::clone(&self.self_job),
            abort_error: Arc::clone(&self.abort_error),
            host_rounds: None,
            hierarchical_data: None,
            retirement: Arc::clone(&self.retirement),
        }))
    }

    /// Sends elements to rank `to`, and returns when the elements have left this rank. The send of a short message may return
    /// before the receive is posted, because the receiver stores the message. The send of a long message waits for the
    /// receive. A message from a rank to itself is copied, so its send returns at once.
    ///
    /// With [`SendOptions::synchronous`], this method returns only after a receive has matched the message. That costs a
    /// round trip. If a rank sends a synchronous message to itself, the receive must already be posted, or must be in
    /// another thread.
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
        let request = self.send_request::<B::Element>(elements.len(), options.into(), site)?;
        let to = self.world_rank(to)?;
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
        let request =
            self.send_request::<B::Element>(elements.as_ref().len(), options.into(), Site::here())?;
        self.submit_send(request, elements, to)
    }

    /// Begins a send to rank `to` of the group, and returns its handle.
    pub(super) fn submit_send<B: OwnedBuffer>(
        &self,
        request: OperationRequest,
        elements: B,
        to: Rank,
    ) -> Result<Handle<B>, Error> {
        let to = self.world_rank(to)?;
        let job = self.message_job()?;
        if job.driver.try_send_directly(&request, to, bytemuck::cast_slice(elements.as_ref())) {
            return Ok(Handle::ready(Ok(elements)));
        }
        let id = job.driver.submit(request, Submission::Send(to, Memory::owned(elements)))?;
        let make_result = |output: OperationOutput| output.memory.into_owned().ok_or(Error::Taken);
        Ok(Handle::pending(Arc::clone(job), id, make_result))
    }

    /// Receives a message into the beginning of `buffer`, which must be long enough for the message. A tag of `None`
    /// accepts any tag.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::send`], and [`Error::NothingSent`] if only this rank itself could send the message
    /// and has not sent it.
    #[track_caller]
    pub fn receive<B: Buffer + ?Sized>(
        &self,
        buffer: &mut B,
        source: impl Into<Source>,
        tag: impl Into<Option<u32>>,
    ) -> Result<Status, Error> {
        let site = Site::here();
        let elements = buffer.elements_mut()?;
        let (request, pattern) =
            self.receive_request_and_pattern::<B::Element>(elements.len(), source.into(), tag.into(), site)?;
        self.receive_with(request, pattern, elements, |memory| memory)
    }

    /// Receives a message into memory that `convert` makes from the caller's elements.
    fn receive_with<T: Element>(
        &self,
        request: OperationRequest,
        pattern: Pattern,
        elements: &mut [T],
        convert: impl FnOnce(Memory) -> Memory,
    ) -> Result<Status, Error> {
        let driver = &self.message_job()?.driver;
        if self.accepts_only_own_messages(pattern) && driver.probe(pattern, driver.now())?.is_none() {
            return Err(Error::NothingSent);
        }
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(elements);
        let envelope = driver.receive(request, pattern, bytes, convert)?;
        envelope.map(|envelope| self.status(&envelope)).ok_or(Error::Taken)
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
        let site = Site::here();
        let elements = buffer.elements_mut()?;
        let room = elements.len();
        let (request, pattern) =
            self.receive_request_and_pattern::<B::Element>(usize::MAX, source.into(), tag.into(), site)?;
        let convert = |memory: Memory| memory.or_allocated_if_longer::<B::Element>();
        self.receive_with(request, pattern, elements, convert).and_then(|status| check_length(status, room))
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
        let room = buffer.as_ref().len();
        let (request, pattern) = self.receive_request_and_pattern::<B::Element>(
            usize::MAX,
            source.into(),
            tag.into(),
            Site::here(),
        )?;
        self.submit_receive_into(
            request,
            pattern,
            Memory::owned(buffer).or_allocated_if_longer::<B::Element>(),
            room,
        )
    }

    /// Asynchronously receives a message of at most `count_max` elements. The receive allocates the memory that the message
    /// needs.
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
        let site = Site::here();
        let (request, pattern) =
            self.receive_request_and_pattern::<T>(count_max, source.into(), tag.into(), site)?;
        self.submit_receive(request, pattern)
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
        let count = buffer.as_ref().len();
        let (request, pattern) =
            self.receive_request_and_pattern::<B::Element>(count, source.into(), tag.into(), Site::here())?;
        self.submit_receive_into(request, pattern, Memory::owned(buffer), count)
    }

    /// Begins a receive into `memory` of `room` elements. The handle returns the owned buffer and the status.
    fn submit_receive_into<B: OwnedBuffer>(
        &self,
        request: OperationRequest,
        pattern: Pattern,
        memory: Memory,
        room: usize,
    ) -> Result<Handle<(B, Status)>, Error> {
        let job = self.message_job()?;
        let id = job.driver.submit(request, Submission::Receive(pattern, memory))?;
        let members = Arc::clone(&self.members);
        Ok(Handle::pending(Arc::clone(job), id, move |output: OperationOutput| {
            let envelope = output.envelope.ok_or(Error::Taken)?;
            let status = check_length(status(&members, &envelope), room)?;
            Ok((output.memory.into_owned().ok_or(Error::Taken)?, status))
        }))
    }

    /// Begins a receive that allocates the memory that the message needs.
    pub(super) fn submit_receive<T: Element>(
        &self,
        request: OperationRequest,
        pattern: Pattern,
    ) -> Result<Handle<Received<T>>, Error> {
        let job = self.message_job()?;
        let id =
            job.driver.submit(request, Submission::Receive(pattern, Memory::allocated_on_match::<T>()))?;
        let members = Arc::clone(&self.members);
        Ok(Handle::pending(Arc::clone(job), id, move |output: OperationOutput| {
            let envelope = output.envelope.ok_or(Error::Taken)?;
            let status = status(&members, &envelope);
            Ok(Received { elements: output.memory.into_elements(), status })
        }))
    }

    /// Sends a message to one rank, and at the same time receives a message from another rank or the same rank
    /// (`MPI_Sendrecv`). Programs use it for example to exchange halos.
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
        let send_request = self.send_request::<I::Element>(elements.len(), send_tag.into(), site)?;
        let to = self.world_rank(to)?;
        let (receive_request, pattern) =
            self.receive_request_and_pattern::<B::Element>(buffer.len(), source, receive_tag, site)?;
        let driver = &self.message_job()?.driver;
        let bytes: &[u8] = bytemuck::cast_slice(elements);
        if driver.try_send_directly(&send_request, to, bytes) {
            return self.receive_with(receive_request, pattern, buffer, |memory| memory);
        }
        memory::lend(bytes, |memory| {
            let sent = driver.begin(send_request, Submission::Send(to, memory), true)?;
            let received = self.receive_with(receive_request, pattern, buffer, |memory| memory);
            // The send must end even if the receive has failed, because the send uses the borrowed elements.
            driver.wait_for_borrowed(sent).unwrap_or(Err(Error::Taken))?;
            received
        })
    }

    /// Returns the status of a message that has arrived and that no receive has matched (`MPI_Iprobe`). The message is not
    /// received.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::send`].
    pub fn probe_now(
        &self,
        source: impl Into<Source>,
        tag: impl Into<Option<u32>>,
    ) -> Result<Option<Status>, Error> {
        self.probe_for(source, tag, Duration::ZERO)
    }

    /// Waits until a message has arrived that no receive has matched (`MPI_Probe`). The message is not received. Returns
    /// `None` after `timeout`. Returns `None` at once if only this rank itself could send the message and has not sent it.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::send`].
    pub fn probe_for(
        &self,
        source: impl Into<Source>,
        tag: impl Into<Option<u32>>,
        timeout: Duration,
    ) -> Result<Option<Status>, Error> {
        let pattern = self.pattern(source.into(), tag.into())?;
        let driver = &self.message_job()?.driver;
        let timeout = if self.accepts_only_own_messages(pattern) { Duration::ZERO } else { timeout };
        let until = driver.now().saturating_add(timeout);
        Ok(driver.probe(pattern, until)?.map(|envelope| self.status(&envelope)))
    }

    /// Returns the arguments with which the engine begins a send.
    pub(super) fn send_request<T: Element>(
        &self,
        count: usize,
        SendOptions { tag, mode }: SendOptions,
        site: Site,
    ) -> Result<OperationRequest, Error> {
        if tag == ANY_TAG {
            return Err(Error::InvalidTag);
        }
        Ok(OperationRequest { mode, ..self.message_request::<T>(count, tag, site) })
    }

    /// Returns the arguments with which the engine begins a receive, and the pattern of the messages that the receive accepts.
    pub(super) fn receive_request_and_pattern<T: Element>(
        &self,
        count_max: usize,
        source: Source,
        tag: Option<u32>,
        site: Site,
    ) -> Result<(OperationRequest, Pattern), Error> {
        let pattern = self.pattern(source, tag)?;
        // A message cannot be longer than the address space.
        let count_max = count_max.min(isize::MAX as usize / size_of::<T>());
        Ok((self.message_request::<T>(count_max, tag.unwrap_or(ANY_TAG), site), pattern))
    }

    /// Returns the arguments with which the engine begins a standard send or a receive of `count` elements.
    fn message_request<T: Element>(&self, count: usize, tag: u32, site: Site) -> OperationRequest {
        let contract = Contract {
            operation: Operation::Message,
            dtype: T::DTYPE,
            reduction: None,
            algorithm: self.algorithm_of::<T>(Operation::Message, count),
            root: Rank::ZERO,
            count: count as u64,
            layout: tag,
        };
        let (timeout, spent, mode) = (self.timeout, Duration::ZERO, SendMode::Standard);
        OperationRequest { group: self.id, contract, timeout, spent, site, mode }
    }

    /// Returns the rank in the world of a rank of the group.
    fn world_rank(&self, peer: Rank) -> Result<Rank, Error> {
        let member = self.members.get(peer.index()).copied();
        member.ok_or(Error::InvalidPeer { peer, world: self.world })
    }

    /// Returns the pattern of the messages from `source` with `tag`.
    fn pattern(&self, source: Source, tag: Option<u32>) -> Result<Pattern, Error> {
        let source = match source {
            Source::Any => None,
            Source::Rank(rank) => Some(self.world_rank(rank)?),
        };
        if tag == Some(ANY_TAG) {
            return Err(Error::InvalidTag);
        }
        Ok(Pattern { group: self.id, source, tag })
    }

    /// Returns whether only this rank itself can send a message that fits the pattern.
    fn accepts_only_own_messages(&self, pattern: Pattern) -> bool {
        let own = self.members[self.rank.index()];
        self.world == WorldSize::ONE || pattern.source == Some(own)
    }

    /// Returns the job that carries messages. In a world of one rank, this is a job for messages of the rank to itself. The first
    /// call creates this job.
    fn message_job(&self) -> Result<&Arc<SharedJob>, Error> {
        self.check_abort()?;
        if let Some(job) = self.job.as_ref().or_else(|| self.self_job.get()) {
            return Ok(job);
        }
        let job = join::create_self_job()?;
        Ok(self.self_job.get_or_init(|| Arc::new(job)))
    }

    fn status(&self, envelope: &Envelope) -> Status {
        status(&self.members, envelope)
    }
}

/// Returns an error if the message is longer than the buffer of `room` elements.
fn check_length(status: Status, room: usize) -> Result<Status, Error> {
    if status.count <= room { Ok(status) } else { Err(Error::Truncated { status, room }) }
}

/// Returns the status of a message. The envelope names a rank of the world, and the status names a rank of the group.
fn status(members: &[Rank], envelope: &Envelope) -> Status {
    let position = members.iter().position(|&member| member == envelope.source);
    Status {
        source: Rank::new(position.unwrap_or_default() as u32),
        tag: envelope.tag,
        dtype: envelope.contract.dtype,
        count: envelope.contract.count as usize,
    }
}
