//! A search of all states of two ranks that dial each other (`transport/tcp/simultaneous_open.rs`): every interleaving of dials,
//! handshake messages, closed connections and failures. Both ranks must choose the same connection.

use std::collections::BTreeSet;

use crate::transport::tcp::SimultaneousOpen;
use crate::types::Rank;

/// The state of one rank. Connections are represented by their numbers.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum SideState {
    Idle,
    Opening(SimultaneousOpen<usize, usize>),
    Open(usize),
    Lost,
}

/// The progress of a connection's handshake.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum HandshakeStage {
    Connecting,
    /// The dialer waits for the acceptor's hello.
    Greeting,
    /// The dialer has sent its proof.
    Proved,
    /// The acceptor has received the proof.
    ProofReceived,
    /// The acceptor has sent the verdict that accepts the connection.
    Accepted,
    /// The dialer has received the verdict.
    Done,
}

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct SimulatedConnection {
    /// The side that dials.
    dialer: usize,
    stage: HandshakeStage,
    /// `is_closed[side]` is true if this side has closed its end of the connection.
    is_closed: [bool; 2],
}

/// Two ranks and the connections between them.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct DialModelState {
    /// For each side: its own rank, and the rank that it believes the peer has. The order of the two ranks
    /// decides which connection wins.
    ranks: [(u32, u32); 2],
    sides: [SideState; 2],
    connections: Vec<SimulatedConnection>,
    /// Whether each side may still begin to dial.
    may_dial: [bool; 2],
    /// The number of dials that may still fail.
    failures: usize,
    /// The number of connections that the accepting side may still close before it receives the proof.
    early_closes: usize,
}

impl DialModelState {
    fn new(ranks: [(u32, u32); 2], may_dial: [bool; 2], failures: usize, early_closes: usize) -> Self {
        let sides = [SideState::Idle, SideState::Idle];
        Self { ranks, sides, connections: Vec::new(), may_dial, failures, early_closes }
    }

    /// Adds a connection that a side dials, and returns its number.
    fn dial(&mut self, side: usize) -> usize {
        let is_closed = [false; 2];
        self.connections.push(SimulatedConnection {
            dialer: side,
            stage: HandshakeStage::Connecting,
            is_closed,
        });
        self.connections.len() - 1
    }

    fn handle_peer_dial(&mut self, side: usize, connection: usize) {
        self.connections[connection].stage = HandshakeStage::ProofReceived;
        match &mut self.sides[side] {
            SideState::Idle => self.open(side, connection),
            SideState::Opening(opening) => {
                let (ours, earlier) = (opening.ours, opening.theirs);
                if let Some(link) = opening.handle_peer_dial(connection) {
                    self.connections[ours].is_closed[side] = true;
                    self.open(side, link);
                } else if let Some(earlier) = earlier {
                    self.connections[earlier].is_closed[side] = true;
                }
            }
            SideState::Open(_) | SideState::Lost => self.connections[connection].is_closed[side] = true,
        }
    }

    fn handle_failed_dial(&mut self, side: usize) {
        let SideState::Opening(opening) = &mut self.sides[side] else { panic!("{self:?}") };
        self.connections[opening.ours].is_closed[side] = true;
        match opening.theirs.take() {
            Some(theirs) => self.open(side, theirs),
            None => self.sides[side] = SideState::Lost,
        }
    }

    /// Makes a connection the link of a side.
    fn open(&mut self, side: usize, connection: usize) {
        let accepts = self.connections[connection].dialer != side;
        self.connections[connection].stage =
            if accepts { HandshakeStage::Accepted } else { HandshakeStage::Done };
        self.sides[side] = SideState::Open(connection);
    }

    /// Returns each state that results from one further event.
    fn successors(&self) -> Vec<Self> {
        let mut found = Vec::new();
        let mut offer = |change: &dyn Fn(&mut Self)| {
            let mut state = self.clone();
            change(&mut state);
            found.push(state);
        };
        for side in (0..2).filter(|&side| self.may_dial[side]) {
            offer(&|state| {
                state.may_dial[side] = false;
                if state.sides[side] == SideState::Idle {
                    let (own, peer) = state.ranks[side];
                    let ours = state.dial(side);
                    state.sides[side] =
                        SideState::Opening(SimultaneousOpen::new(Rank::new(own), Rank::new(peer), ours));
                }
            });
        }
        for (number, connection) in self.connections.iter().enumerate() {
            let (dialer, acceptor) = (connection.dialer, 1 - connection.dialer);
            let is_dialer_open = !connection.is_closed[dialer];
            let is_acceptor_open = !connection.is_closed[acceptor];
            let advance = |to: HandshakeStage| move |state: &mut Self| state.connections[number].stage = to;
            let is_unproved =
                matches!(connection.stage, HandshakeStage::Connecting | HandshakeStage::Greeting);
            let is_unread = is_unproved || connection.stage == HandshakeStage::Proved;
            if is_unproved && is_dialer_open && self.failures > 0 {
                offer(&|state| {
                    state.failures -= 1;
                    state.connections[number].is_closed = [true; 2];
                    state.handle_failed_dial(dialer);
                });
            }
            if is_unread && is_acceptor_open && self.early_closes > 0 {
                offer(&|state| {
                    state.early_closes -= 1;
                    state.connections[number].is_closed[acceptor] = true;
                });
            }
            match connection.stage {
                HandshakeStage::Connecting if is_dialer_open => offer(&advance(HandshakeStage::Greeting)),
                HandshakeStage::Greeting if is_dialer_open && is_acceptor_open => {
                    offer(&advance(HandshakeStage::Proved));
                }
                HandshakeStage::Greeting | HandshakeStage::Proved if is_dialer_open && !is_acceptor_open => {
                    offer(&|state| state.dial_again(dialer, number));
                }
                HandshakeStage::Proved if is_acceptor_open => {
                    offer(&|state| state.handle_peer_dial(acceptor, number));
                    if !is_dialer_open {
                        // The acceptor may see the reset of a closed connection before it reads the proof.
                        offer(&|state| state.connections[number].is_closed[acceptor] = true);
                    }
                }
                HandshakeStage::ProofReceived if is_dialer_open && !is_acceptor_open => {
                    offer(&|state| state.handle_failed_dial(dialer));
                }
                HandshakeStage::Accepted if is_dialer_open => {
                    offer(&|state| state.use_own_dial(dialer, number));
                }
                _ => {}
            }
        }
        found
    }

    /// The acceptor has closed the connection `closed` before the handshake was complete. The dialer dials again,
    /// unless the peer has opened a connection.
    fn dial_again(&mut self, side: usize, closed: usize) {
        self.connections[closed].is_closed[side] = true;
        let SideState::Opening(opening) = &self.sides[side] else { panic!("{self:?}") };
        if opening.theirs.is_some() {
            return self.handle_failed_dial(side);
        }
        let again = self.dial(side);
        if let SideState::Opening(opening) = &mut self.sides[side] {
            opening.ours = again;
        }
    }

    /// The acceptor has accepted the connection `own`, which the side has dialed.
    fn use_own_dial(&mut self, side: usize, own: usize) {
        let SideState::Opening(opening) = &self.sides[side] else { panic!("{self:?}") };
        if let Some(theirs) = opening.theirs {
            self.connections[theirs].is_closed[side] = true;
        }
        self.open(side, own);
    }

    /// Returns which rule this state breaks, if any. In the first state, `initial_failures` dials may fail.
    fn find_violation(&self, initial_failures: usize) -> Option<&'static str> {
        let open = |side: usize| match self.sides[side] {
            SideState::Open(connection) => Some(connection),
            _ => None,
        };
        let nothing_failed = self.failures == initial_failures;
        if let (Some(one), Some(other)) = (open(0), open(1))
            && one != other
        {
            return Some("the two ranks have chosen different connections");
        }
        for side in 0..2 {
            if nothing_failed && self.sides[side] == SideState::Lost {
                return Some("a link was lost, though no dial had failed");
            }
            if nothing_failed && open(side).is_some_and(|open| self.connections[open].is_closed[1 - side]) {
                return Some("a link was closed by the other end");
            }
        }
        None
    }

    /// Returns which rule for final states this state breaks, if any. A state is final if no further event can
    /// happen.
    fn find_violation_at_end(&self) -> Option<&'static str> {
        let link = match &self.sides {
            [SideState::Open(one), SideState::Open(_)] => *one,
            [SideState::Lost, _] | [_, SideState::Lost] => return None,
            _ => return Some("there is no link"),
        };
        let others = self.connections.iter().enumerate().filter(|&(number, _)| number != link);
        let mut open = others.filter(|(_, connection)| connection.is_closed == [false; 2]);
        open.next().map(|_| "a connection that is not the link was left open")
    }
}

/// Model checker: visits every state ([`DialModelState`]) that any sequence of events can reach from `start`. Returns
/// the number of states, and the number of final states with a link. Returns an error if a state violates a rule.
fn explore_states(start: DialModelState) -> Result<(usize, usize), (&'static str, DialModelState)> {
    let failures = start.failures;
    let (mut seen, mut waiting, mut linked) = (BTreeSet::new(), vec![start], 0);
    while let Some(state) = waiting.pop() {
        if let Some(violation) = state.find_violation(failures) {
            return Err((violation, state));
        }
        let next = state.successors();
        if next.is_empty() {
            if let Some(violation) = state.find_violation_at_end() {
                return Err((violation, state));
            }
            linked += usize::from(matches!(state.sides, [SideState::Open(_), SideState::Open(_)]));
        }
        waiting.extend(next.into_iter().filter(|next| seen.insert(next.clone())));
    }
    Ok((seen.len(), linked))
}

/// The two sides of a link: a side's own rank, and the rank of its peer.
const OWN_AND_PEER_RANKS: [(u32, u32); 2] = [(3, 5), (5, 3)];
/// The tested cases. Each case says for both sides of the link whether the side dials.
const DIALING_SIDES: [[bool; 2]; 3] = [[true, false], [false, true], [true, true]];

#[test]
fn both_ranks_choose_the_same_connection_in_every_interleaving() {
    for may_dial in DIALING_SIDES {
        for early_closes in 0..=2 {
            let (states, linked) =
                explore_states(DialModelState::new(OWN_AND_PEER_RANKS, may_dial, 0, early_closes)).unwrap();
            assert!(states > 3 && linked > 0, "{states} {linked}");
        }
    }
    let (states, _) = explore_states(DialModelState::new(OWN_AND_PEER_RANKS, [true, true], 0, 2)).unwrap();
    assert!(states > 500, "{states} states are too few for all interleavings");
}

#[test]
fn a_failed_dial_never_leads_to_two_links() {
    for may_dial in DIALING_SIDES {
        for failures in 1..=2 {
            explore_states(DialModelState::new(OWN_AND_PEER_RANKS, may_dial, failures, 1)).unwrap();
        }
    }
    // Even if one of two dials fails, the other connection can become the link. The search must therefore find
    // more final states with a link if a dial may fail.
    let failing = DialModelState::new(OWN_AND_PEER_RANKS, [true, true], 1, 0);
    assert!(
        explore_states(failing).unwrap().1
            > explore_states(DialModelState::new(OWN_AND_PEER_RANKS, [true, true], 0, 0)).unwrap().1
    );
}

/// The search must reject wrong rules.
#[test]
fn the_search_finds_violations_if_the_rules_are_wrong() {
    // A wrong rule: both ranks believe that they are the higher rank. Each rank accepts the connection of its
    // peer.
    let violation = explore_states(DialModelState::new([(5, 3), (5, 3)], [true, true], 0, 0)).unwrap_err().0;
    assert!(violation.contains("different") || violation.contains("closed by the other"), "{violation}");
    // A wrong rule: both ranks believe that they are the lower rank. Both wait.
    let violation = explore_states(DialModelState::new([(3, 5), (3, 5)], [true, true], 0, 0)).unwrap_err().0;
    assert_eq!(violation, "there is no link");
}
