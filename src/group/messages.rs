//! Messages from one rank to another.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use super::driver::{OperationOutput, Submission};
use super::memory::{self, Memory};
use super::{Buffer, Error, Group, Handle, Input, OwnedBuffer, SharedJob, join};
use crate::engine::{Begin, Envelope, Pattern, SendMode};
use crate::types::{ANY_TAG, Contract, DType, Element, Operation, Rank, Site, WorldSize};

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

/// How a message is sent. A number alone is a tag: `group.send(&elements, to, 7)`.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct SendOptions {
    /// The tag.
    pub tag: u32,
    /// When the send is complete.
    pub mode: SendMode,
}

impl SendOptions {
    /// A synchronous send with this tag: it is complete only when a receive has matched the message.
    pub fn synchronous(tag: u32) -> Self {
        Self { tag, mode: SendMode::Synchronous }
    }
}

impl From<u32> for SendOptions {
    fn from(tag: u32) -> Self {
        Self { tag, mode: SendMode::Standard }
    }
}

/// The sender, tag, type and length of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Status {
    /// The sender.
    pub source: Rank,
    /// Its tag.
    pub tag: u32,
    /// The type of its elements.
    pub dtype: DType,
    /// The number of elements.
    pub count: usize,
}

/// A message and its status.
#[derive(Clone, PartialEq, Debug)]
pub struct Received<T> {
    /// Its elements.
    pub elements: Vec<T>,
    /// Its sender, tag, type and length.
    pub status: Status,
}

/// A group's messages, for several threads at once: it gives access to all methods that take a group by `&self`. They
/// do not wait for a collective of another thread.
///
/// It keeps the group's connections open, as the group itself does. Its operations have the deadline that the group
/// had when it was made.
#[derive(Clone)]
pub struct Messenger(Arc<Group>);

impl Deref for Messenger {
    type Target = Group;

    fn deref(&self) -> &Group {
        &self.0
    }
}

impl Group {
    /// A handle for messages in this group.
    pub fn messenger(&self) -> Messenger {
        Messenger(Arc::new(Self {
            job: self.job.clone(),
            id: self.id,
            members: Arc::clone(&self.members),
            rank: self.rank,
            world: self.world,
            local: self.local,
            machines: Arc::clone(&self.machines),
            timeout: self.timeout,
            object_operations: 0,
            self_job: Arc::clone(&self.self_job),
            aborted: Arc::clone(&self.aborted),
            shm_executor: None,
            hosts: None,
            membership: Arc::clone(&self.membership),
        }))
    }

    /// Sends elements to `to`, and returns when they have left this rank. That may be before the receive is posted:
    /// the receiver stores short messages, and the sender keeps long ones until then. A message from a rank to itself
    /// is copied, so that this returns at once.
    ///
    /// With [`SendOptions::synchronous`] it returns only after a receive has matched the message, within the group's
    /// deadline. That costs a round trip. A thread that sends a synchronous message to its own rank needs a receive
    /// that was posted before, or one in another thread.
    ///
    /// Messages with the same receiver and tag are received in the order in which they were sent. The receive must be
    /// for at least as many elements of the same type, or both ranks fail.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidPeer`], [`Error::InvalidTag`], [`Error::NotContiguous`], or as [`Group::all_reduce`].
    #[track_caller]
    pub fn send<B: Input + ?Sized>(
        &self,
        elements: &B,
        to: Rank,
        options: impl Into<SendOptions>,
    ) -> Result<(), Error> {
        let site = Site::here();
        let elements = elements.elements()?;
        let begin = self.sending::<B::Element>(elements.len(), options.into(), site)?;
        let to = self.peer(to)?;
        let bytes: &[u8] = bytemuck::cast_slice(elements);
        self.carrier()?.driver.run(begin, bytes, |memory| Submission::Send(to, memory)).map(|_| ())
    }

    /// Starts a [`Group::send`] and returns its handle, which returns the buffer.
    ///
    /// # Errors
    ///
    /// As [`Group::send`]; the handle returns later failures.
    #[track_caller]
    pub fn send_async<B: OwnedBuffer>(
        &self,
        elements: B,
        to: Rank,
        options: impl Into<SendOptions>,
    ) -> Result<Handle<B>, Error> {
        let begin = self.sending::<B::Element>(elements.as_ref().len(), options.into(), Site::here())?;
        self.submit_send(begin, elements, to)
    }

    pub(super) fn submit_send<B: OwnedBuffer>(
        &self,
        begin: Begin,
        elements: B,
        to: Rank,
    ) -> Result<Handle<B>, Error> {
        let to = self.peer(to)?;
        let job = self.carrier()?;
        let id = job.driver.submit(begin, Submission::Send(to, Memory::owned(elements)))?;
        let finish = |outcome: OperationOutput| outcome.memory.into_owned().ok_or(Error::Taken);
        Ok(Handle::pending(Arc::clone(job), id, finish))
    }

    /// Receives a message into the beginning of `buffer`, which must be long enough for it. `None` as a tag means any
    /// tag.
    ///
    /// # Errors
    ///
    /// As [`Group::send`], and [`Error::NothingSent`] if no other rank could send it and this one has not.
    #[track_caller]
    pub fn receive<B: Buffer + ?Sized>(
        &self,
        buffer: &mut B,
        source: impl Into<Source>,
        tag: impl Into<Option<u32>>,
    ) -> Result<Status, Error> {
        let site = Site::here();
        let elements = buffer.elements_mut()?;
        let (begin, pattern) =
            self.receiving::<B::Element>(elements.len(), source.into(), tag.into(), site)?;
        self.receive_into(begin, pattern, elements)
    }

    fn receive_into<T: Element>(
        &self,
        begin: Begin,
        pattern: Pattern,
        elements: &mut [T],
    ) -> Result<Status, Error> {
        self.receive_at(begin, pattern, elements, |memory| memory)
    }

    fn receive_at<T: Element>(
        &self,
        begin: Begin,
        pattern: Pattern,
        elements: &mut [T],
        place: impl FnOnce(Memory) -> Memory,
    ) -> Result<Status, Error> {
        let driver = &self.carrier()?.driver;
        if self.is_for_itself(pattern) && driver.probe(pattern, driver.now())?.is_none() {
            return Err(Error::NothingSent);
        }
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(elements);
        let envelope = driver.run(begin, bytes, |memory| Submission::Receive(pattern, place(memory)))?;
        envelope.map(|envelope| self.status(&envelope)).ok_or(Error::Taken)
    }

    /// [`Group::receive`] that does not fail the group: a message longer than the buffer is received and discarded,
    /// this rank gets [`Error::Truncated`], and the group can still be used, as MPI programs expect.
    ///
    /// # Errors
    ///
    /// As [`Group::receive`], and [`Error::Truncated`].
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
        let (begin, pattern) = self.receiving::<B::Element>(usize::MAX, source.into(), tag.into(), site)?;
        let place = |memory: Memory| memory.if_it_fits::<B::Element>();
        self.receive_at(begin, pattern, elements, place).and_then(|status| fitting(status, room))
    }

    /// Asynchronous [`Group::receive_fitting`]; the handle returns the buffer, if the message fitted.
    ///
    /// # Errors
    ///
    /// As [`Group::send`]; the handle returns later failures and [`Error::Truncated`].
    #[track_caller]
    pub fn receive_fitting_async<B: OwnedBuffer>(
        &self,
        buffer: B,
        source: impl Into<Source>,
        tag: impl Into<Option<u32>>,
    ) -> Result<Handle<(B, Status)>, Error> {
        let room = buffer.as_ref().len();
        let (begin, pattern) =
            self.receiving::<B::Element>(usize::MAX, source.into(), tag.into(), Site::here())?;
        self.submit_receive_at(begin, pattern, Memory::owned(buffer).if_it_fits::<B::Element>(), room)
    }

    /// Asynchronously receives a message of at most `count_max` elements. It allocates as much as the message needs.
    ///
    /// # Errors
    ///
    /// As [`Group::send`]; the handle returns later failures.
    #[track_caller]
    pub fn receive_async<T: Element>(
        &self,
        count_max: usize,
        source: impl Into<Source>,
        tag: impl Into<Option<u32>>,
    ) -> Result<Handle<Received<T>>, Error> {
        let site = Site::here();
        let (begin, pattern) = self.receiving::<T>(count_max, source.into(), tag.into(), site)?;
        self.submit_receive(begin, pattern)
    }

    /// Asynchronously receives a message into the beginning of `buffer`; the handle returns the buffer.
    ///
    /// # Errors
    ///
    /// As [`Group::send`]; the handle returns later failures.
    #[track_caller]
    pub fn receive_into_async<B: OwnedBuffer>(
        &self,
        buffer: B,
        source: impl Into<Source>,
        tag: impl Into<Option<u32>>,
    ) -> Result<Handle<(B, Status)>, Error> {
        let count = buffer.as_ref().len();
        let (begin, pattern) =
            self.receiving::<B::Element>(count, source.into(), tag.into(), Site::here())?;
        self.submit_receive_at(begin, pattern, Memory::owned(buffer), count)
    }

    fn submit_receive_at<B: OwnedBuffer>(
        &self,
        begin: Begin,
        pattern: Pattern,
        memory: Memory,
        room: usize,
    ) -> Result<Handle<(B, Status)>, Error> {
        let job = self.carrier()?;
        let id = job.driver.submit(begin, Submission::Receive(pattern, memory))?;
        let members = Arc::clone(&self.members);
        Ok(Handle::pending(Arc::clone(job), id, move |outcome: OperationOutput| {
            let envelope = outcome.envelope.ok_or(Error::Taken)?;
            let status = fitting(status(&members, &envelope), room)?;
            Ok((outcome.memory.into_owned().ok_or(Error::Taken)?, status))
        }))
    }

    pub(super) fn submit_receive<T: Element>(
        &self,
        begin: Begin,
        pattern: Pattern,
    ) -> Result<Handle<Received<T>>, Error> {
        let job = self.carrier()?;
        let id = job.driver.submit(begin, Submission::Receive(pattern, Memory::later::<T>()))?;
        let members = Arc::clone(&self.members);
        Ok(Handle::pending(Arc::clone(job), id, move |outcome: OperationOutput| {
            let envelope = outcome.envelope.ok_or(Error::Taken)?;
            let status = status(&members, &envelope);
            Ok(Received { elements: outcome.memory.into_elements(), status })
        }))
    }

    /// Sends to one rank and receives from another, or the same, at the same time, as in the exchange of halos.
    ///
    /// # Errors
    ///
    /// As [`Group::send`] and [`Group::receive`].
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
        let send = self.sending::<I::Element>(elements.len(), send_tag.into(), site)?;
        let to = self.peer(to)?;
        let (begin, pattern) = self.receiving::<B::Element>(buffer.len(), source, receive_tag, site)?;
        let driver = &self.carrier()?.driver;
        let bytes: &[u8] = bytemuck::cast_slice(elements);
        memory::lend(bytes, |memory| {
            let sent = driver.begin(send, Submission::Send(to, memory), true)?;
            let received = self.receive_into(begin, pattern, buffer);
            // What is lent comes back, whatever became of the other half.
            driver.wait_for_borrowed(sent).unwrap_or(Err(Error::Taken))?;
            received
        })
    }

    /// Looks for a message that has arrived and has no receive yet. The message is not received.
    ///
    /// # Errors
    ///
    /// As [`Group::send`].
    pub fn probe_now(
        &self,
        source: impl Into<Source>,
        tag: impl Into<Option<u32>>,
    ) -> Result<Option<Status>, Error> {
        self.probe_for(source, tag, Duration::ZERO)
    }

    /// Waits until a message has arrived that has no receive yet. The message is not received. `None` after
    /// `timeout`, and at once if no other rank could send it and this one has not.
    ///
    /// # Errors
    ///
    /// As [`Group::send`].
    pub fn probe_for(
        &self,
        source: impl Into<Source>,
        tag: impl Into<Option<u32>>,
        timeout: Duration,
    ) -> Result<Option<Status>, Error> {
        let pattern = self.pattern(source.into(), tag.into())?;
        let driver = &self.carrier()?.driver;
        let timeout = if self.is_for_itself(pattern) { Duration::ZERO } else { timeout };
        let until = driver.now().saturating_add(timeout);
        Ok(driver.probe(pattern, until)?.map(|envelope| self.status(&envelope)))
    }

    /// What a sender asks for.
    pub(super) fn sending<T: Element>(
        &self,
        count: usize,
        SendOptions { tag, mode }: SendOptions,
        site: Site,
    ) -> Result<Begin, Error> {
        if tag == ANY_TAG {
            return Err(Error::InvalidTag);
        }
        Ok(Begin { mode, ..self.message::<T>(count, tag, site) })
    }

    /// What is asked for by who receives, and from whom.
    pub(super) fn receiving<T: Element>(
        &self,
        count_max: usize,
        source: Source,
        tag: Option<u32>,
        site: Site,
    ) -> Result<(Begin, Pattern), Error> {
        let pattern = self.pattern(source, tag)?;
        // No message is longer than memory can be.
        let count_max = count_max.min(isize::MAX as usize / size_of::<T>());
        Ok((self.message::<T>(count_max, tag.unwrap_or(ANY_TAG), site), pattern))
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
        let (timeout, spent, mode) = (self.timeout, Duration::ZERO, SendMode::Standard);
        Begin { group: self.id, contract, timeout, spent, site, mode }
    }

    /// The rank in the job of a member.
    fn peer(&self, peer: Rank) -> Result<Rank, Error> {
        let member = self.members.get(peer.index()).copied();
        member.ok_or(Error::InvalidPeer { peer, world: self.world })
    }

    fn pattern(&self, source: Source, tag: Option<u32>) -> Result<Pattern, Error> {
        let source = match source {
            Source::Any => None,
            Source::Rank(rank) => Some(self.peer(rank)?),
        };
        if tag == Some(ANY_TAG) {
            return Err(Error::InvalidTag);
        }
        Ok(Pattern { group: self.id, source, tag })
    }

    /// Whether no other rank can send what fits.
    fn is_for_itself(&self, pattern: Pattern) -> bool {
        let own = self.members[self.rank.index()];
        self.world == WorldSize::ONE || pattern.source == Some(own)
    }

    /// What carries messages: the job, or, in a world of one, an engine for those to itself, made when it is first needed.
    fn carrier(&self) -> Result<&Arc<SharedJob>, Error> {
        self.driver()?;
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

/// What is known of a message, if there is room for it.
fn fitting(status: Status, room: usize) -> Result<Status, Error> {
    if status.count <= room { Ok(status) } else { Err(Error::Truncated { status, room }) }
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
