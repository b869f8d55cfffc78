//! What the driver has to send, and what it has to do with each frame that arrives.

use std::ops::Range;

use bytes::Bytes;

use super::request::{OpId, OperationKey};
use crate::schedule::Action;
use crate::wire::FrameHeader;

/// A frame to send. The driver sends the whole frame before any other frame to the same peer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Transmit {
    /// A segment: the header, then elements of the operation's buffer. If the header has a checksum field, the driver fills
    /// it in.
    Segment {
        /// The operation.
        operation: OpId,
        /// The frame's header.
        header: FrameHeader,
        /// The elements to send.
        range: Range<usize>,
    },
    /// A control frame: the header, then the payload.
    Control {
        /// The frame's header.
        header: FrameHeader,
        /// The payload.
        payload: Bytes,
    },
}

/// What the driver has to do with a frame whose header has arrived.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FrameVerdict {
    /// Receive the payload, apply it to the elements of `range`, and then call
    /// [`Engine::handle_applied_segment`](super::Engine::handle_applied_segment).
    Apply {
        /// The operation.
        operation: OpId,
        /// The elements of the operation's buffer.
        range: Range<usize>,
        /// Whether to copy or to reduce the payload.
        action: Action,
    },
    /// Receive the payload and store it under this key until
    /// [`Engine::check_stored_frame`](super::Engine::check_stored_frame) returns [`FrameVerdict::Apply`].
    Store(OperationKey),
    /// Receive the payload and pass it to [`Engine::handle_control_frame`](super::Engine::handle_control_frame).
    Control,
    /// Do nothing: the frame has no payload, and the engine has handled it.
    Handled,
    /// Receive the payload and throw it away, because the job has failed.
    Discard,
    /// Read no more from this link, because the peer broke the protocol.
    Refuse,
}
