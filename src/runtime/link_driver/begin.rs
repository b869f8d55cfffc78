//! Begins operations over links.

use super::{BufferAndReduction, LinkDriver};
use crate::engine::{Failure, OpId, OperationRequest, Pattern, Timestamp};
use crate::runtime::gathering::Gathering;
use crate::runtime::link_io::ActiveOperation;
use crate::runtime::memory::Memory;
use crate::schedule::Schedule;
use crate::transport::Transport;
use crate::types::{Contract, Rank, Site};

/// Why a job fails if a rank has no memory for the buffers of all ranks.
const NO_MEMORY: &str =
    "there is not enough memory for the buffers of all ranks: choose an algorithm that needs less memory";

impl<T: Transport> LinkDriver<T> {
    /// Begins the next collective of a group.
    ///
    /// # Errors
    ///
    /// The same errors as [`Engine::begin`].
    pub fn begin(
        &mut self,
        now: Timestamp,
        request: OperationRequest,
        schedule: Schedule,
        mut buffer_and_reduction: BufferAndReduction,
    ) -> Result<OpId, Failure> {
        for peer in schedule.peers() {
            self.connect(now, peer);
        }
        let gathering = match schedule.workspace {
            None => None,
            Some(workspace) => {
                let element_bytes = request.contract.dtype.size_bytes();
                match Gathering::begin(workspace, buffer_and_reduction.memory, element_bytes) {
                    None => return Err(self.engine.abort(NO_MEMORY)),
                    Some((memory, gathering)) => {
                        buffer_and_reduction.memory = memory;
                        Some(Box::new(gathering))
                    }
                }
            }
        };
        let id = self.engine.begin(now, request, schedule)?;
        self.add_operation(id, request, buffer_and_reduction, gathering);
        Ok(id)
    }

    /// Begins to send a message to `to`. The contract's `layout` is the tag of the message.
    ///
    /// # Errors
    ///
    /// The same errors as [`Engine::send`].
    pub fn send_message(
        &mut self,
        now: Timestamp,
        request: OperationRequest,
        to: Rank,
        memory: Memory,
    ) -> Result<OpId, Failure> {
        self.connect(now, to);
        let id = self.engine.send(now, request, to)?;
        self.add_operation(id, request, BufferAndReduction { memory, kernels: None, divisor: 1 }, None);
        if to == self.settings.rank {
            self.operations.copy_message_to_self(id, request.contract.count as usize);
            self.operations.deliver_messages_to_self(&mut self.engine);
        }
        Ok(id)
    }

    /// Begins to receive a message that fits the pattern.
    ///
    /// # Errors
    ///
    /// The same errors as [`Engine::receive`].
    pub fn receive_message(
        &mut self,
        now: Timestamp,
        request: OperationRequest,
        pattern: Pattern,
        memory: Memory,
    ) -> Result<OpId, Failure> {
        if let Some(source) = pattern.source {
            self.connect(now, source);
        }
        let id = self.engine.receive(now, request, pattern)?;
        self.add_operation(id, request, BufferAndReduction { memory, kernels: None, divisor: 1 }, None);
        self.operations.deliver_messages_to_self(&mut self.engine);
        Ok(id)
    }

    /// Assigns the next number of a group to an operation of several internal operations. See [`Engine::assign_number`].
    ///
    /// # Errors
    ///
    /// The failure, if a rank has already sent a frame of a different operation with this number.
    pub fn assign_number(
        &mut self,
        group: u32,
        contract_and_site: (Contract, Site),
    ) -> Result<OpId, Failure> {
        let (id, key) = self.engine.assign_number(group, contract_and_site)?;
        // The engine checks the frames that arrive from now on. A frame that arrived earlier is stored, and is checked here.
        if let Some((peer, header)) = self.operations.first_stored(key) {
            self.engine.handle_late_frame(peer, &header);
        }
        self.engine.failure().map_or(Ok(id), |failure| Err(failure.clone()))
    }

    /// Adds an operation that the engine has begun, and applies its stored frames.
    fn add_operation(
        &mut self,
        id: OpId,
        request: OperationRequest,
        BufferAndReduction { memory, kernels, divisor }: BufferAndReduction,
        gathering: Option<Box<Gathering>>,
    ) {
        let element_bytes = request.contract.dtype.size_bytes();
        let active = ActiveOperation { memory, element_bytes, kernels, divisor, gathering };
        self.operations.active.insert(id, active);
        if let Some(key) = self.engine.key_of(id) {
            self.operations.apply_stored(key, &mut self.engine);
        }
    }
}
