//! A rank's side of the rendezvous: the socket and the clock of a [`RankRegistration`].

use std::net::IpAddr;
use std::time::Instant;

use mio::net::TcpStream;
use mio::{Interest, Registry, Token};

use super::registration::{RankRegistration, Registration, RegistrationStep};
use super::{Member, Roster, StartError};
use crate::transport::poller::{FIRST_TOKEN, Poller};
use crate::types::Rank;

/// Registers this rank and returns the roster once all ranks have registered. `listen` receives the local address of
/// the connection to the rendezvous, opens the listening socket, and returns the [`Member`] to register. `name`
/// formats a rank for errors.
///
/// # Errors
///
/// [`StartError`], which names the missing ranks or the problem between this rank and the rendezvous.
pub fn register(
    registration: &Registration<'_>,
    listen: impl FnOnce(IpAddr) -> Result<Member, StartError>,
    name: impl Fn(Rank) -> String,
) -> Result<Roster, StartError> {
    let system = |source| StartError::System { what: "an event queue", source };
    let started = Instant::now();
    let mut poller = Poller::new().map_err(system)?;
    let sockets = poller.registry().map_err(system)?;
    let (mut state, mut listen) = (RankRegistration::new(registration), Some(listen));
    let mut events = Vec::new();
    loop {
        let now = started.elapsed();
        match state.advance(now, &name) {
            RegistrationStep::Dial => state.dial(now, connect(registration, &sockets), rand::random()),
            RegistrationStep::Register(stream) => {
                let local =
                    stream.local_addr().map_err(|error| registration.lost_error(&error.to_string()))?;
                let listen = listen.take().ok_or_else(|| registration.lost_error("it accepted twice"))?;
                state.register(now, &listen(local.ip())?);
            }
            RegistrationStep::Wait { until } => {
                events.clear();
                poller.wait(Some(until.saturating_sub(now)), &mut events).map_err(system)?;
            }
            RegistrationStep::End(result) => return result,
        }
    }
}

/// Begins to connect to the rendezvous.
fn connect(registration: &Registration<'_>, sockets: &Registry) -> std::io::Result<TcpStream> {
    let mut stream = TcpStream::connect(registration.address)?;
    stream.set_nodelay(true)?;
    sockets.register(&mut stream, Token(FIRST_TOKEN), Interest::READABLE | Interest::WRITABLE)?;
    Ok(stream)
}
