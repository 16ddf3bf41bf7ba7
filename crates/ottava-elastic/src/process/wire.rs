//! Messages on the connections of keepers: a length of four bytes, little-endian, and JSON.

use super::memory::Listing;
use crate::message::{Epoch, HostId, Step, Stored, Term, ToHub, ToKeeper};
use ottava_common::hash::{hex, sha256_of};
use ottava_tensor::comm::process::random_bytes;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

/// The maximum length of a message in bytes. A message to a job of 10,000 hosts takes about 2 MB.
const LONGEST: usize = 64 << 20;

/// The maximum length of a message of a sender that has not proved the secret yet.
const LONGEST_UNPROVEN: usize = 64 << 10;

/// The time within which both sides of a new connection must prove the secret.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// Writes `message` to `stream`.
pub(super) fn send(stream: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_vec(message).expect("messages are plain data");
    let length = u32::try_from(text.len()).ok().filter(|_| text.len() <= LONGEST).ok_or(ErrorKind::InvalidInput)?;
    stream.write_all(&[&length.to_le_bytes()[..], &text].concat())
}

/// Reads a message from `stream`. Errors with [`ErrorKind::InvalidData`] if it is no message of this type, or too long.
pub(super) fn receive<T: DeserializeOwned>(stream: &mut impl Read) -> io::Result<T> {
    receive_up_to(stream, LONGEST)
}

fn receive_up_to<T: DeserializeOwned>(stream: &mut impl Read, longest: usize) -> io::Result<T> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > longest {
        return Err(ErrorKind::InvalidData.into());
    }
    // Memory is taken as bytes arrive, not as a peer announces them.
    let mut text = Vec::new();
    stream.take(length as u64).read_to_end(&mut text)?;
    if text.len() < length {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    serde_json::from_slice(&text).map_err(|_| ErrorKind::InvalidData.into())
}

/// A host of the job, as the hub knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Contact {
    pub host: HostId,
    /// The address at which its keeper listens.
    pub address: String,
    /// The address at which rank 0 listens if the host has place 0.
    pub ranks_address: String,
    /// The name of the host, for messages.
    pub name: String,
}

/// What the hub tells all keepers about the job, so that each of them can start a new hub.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Roster {
    pub contacts: Vec<Contact>,
    /// The host of the hub.
    pub hub: HostId,
    /// The step of the newest complete checkpoint.
    pub disk: Option<Step>,
}

impl Roster {
    pub fn contact(&self, host: HostId) -> Option<&Contact> {
        self.contacts.iter().find(|contact| contact.host == host)
    }

    /// Returns the name of a host in messages.
    pub fn name(&self, host: HostId) -> String {
        match self.contact(host) {
            Some(contact) => format!("host {host} ({})", contact.name),
            None => format!("host {host}"),
        }
    }
}

/// The first message of a connection, after the proofs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Purpose {
    /// The keeper follows the hub at the other side. The ports are the ports of [`Contact`].
    Follow { port: u16, ranks_port: u16, name: String },
    /// The bytes of a snapshot follow, as a copy for the other host.
    Copy { epoch: Epoch, stored: Stored, listing: Listing },
    /// A copy that the other host sent is stored.
    Copied { epoch: Epoch, stored: Stored },
    /// The other side sends the bytes of a share.
    Fetch { stored: Stored },
}

/// A message of a keeper on its connection to the hub.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Up {
    Message(ToHub),
    /// A checkpoint of this step is complete on disk.
    Saved(Step),
    /// A rank of this host is slower than the ranks of other hosts.
    Slow,
    Alive,
}

/// A message of the hub.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Down {
    /// The first message: the number of the hub.
    Welcome(Term),
    Message(ToKeeper),
    Roster(Roster),
    Alive,
}

/// What a process must have to take part in a job.
#[derive(Clone, Debug)]
pub(super) struct Credentials {
    pub secret: Vec<u8>,
    /// The version and the build of the program, and the settings that must be equal.
    pub identity: String,
}

#[derive(Serialize, Deserialize)]
struct Challenge {
    nonce: String,
}

#[derive(Serialize, Deserialize)]
struct Hello {
    nonce: String,
    proof: String,
    /// The [`Opening`] as text, which the proof covers.
    opening: String,
}

/// Who opens a connection, and why.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Opening {
    pub host: HostId,
    identity: String,
    pub purpose: Purpose,
}

#[derive(Serialize, Deserialize)]
enum Answer {
    Accepted { proof: String },
    Refused { reason: String },
}

impl Credentials {
    /// Returns the proof that `side` knows the secret. The outer hash hides the state of the inner one.
    fn proof(&self, side: &str, nonces: [&str; 2], text: &str) -> String {
        let key = sha256_of(&[&self.secret]);
        let parts: Vec<Vec<u8>> =
            [side, nonces[0], nonces[1], text].map(|part| sha256_of(&[part.as_bytes()]).to_vec()).to_vec();
        hex(&sha256_of(&[&key, &sha256_of(&[&key, &parts.concat()])]))
    }

    /// Connects to the keeper at `address`. Errors with [`ErrorKind::PermissionDenied`] if the other side refuses: the message has the reason.
    pub fn connect(&self, address: &str, host: HostId, purpose: Purpose, silence: Duration) -> io::Result<TcpStream> {
        let address = address.to_socket_addrs()?.next().ok_or(ErrorKind::AddrNotAvailable)?;
        let mut stream = TcpStream::connect_timeout(&address, silence.min(HANDSHAKE))?;
        prepare(&stream, HANDSHAKE)?;
        let challenge: Challenge = receive_up_to(&mut stream, LONGEST_UNPROVEN)?;
        let nonce = hex(&random_bytes()?);
        let opening = Opening { host, identity: self.identity.clone(), purpose };
        let opening = serde_json::to_string(&opening).expect("plain data");
        let proof = self.proof("keeper", [&challenge.nonce, &nonce], &opening);
        send(&mut stream, &Hello { nonce: nonce.clone(), proof, opening })?;
        match receive(&mut stream)? {
            Answer::Accepted { proof } if proof == self.proof("server", [&nonce, &challenge.nonce], "") => {
                prepare(&stream, silence)?;
                Ok(stream)
            }
            Answer::Accepted { .. } => Err(refused("it does not know the secret of this job")),
            Answer::Refused { reason } => Err(refused(&reason)),
        }
    }

    /// Receives the opening of a new connection. Refuses keepers with another secret, program or settings.
    pub fn accept(&self, stream: &mut TcpStream, silence: Duration) -> io::Result<Opening> {
        prepare(stream, HANDSHAKE)?;
        let nonce = hex(&random_bytes()?);
        send(stream, &Challenge { nonce: nonce.clone() })?;
        // A listing of a snapshot has a line for each file, so it is longer than a proof; it is read before the proof is checked.
        let hello: Hello = receive_up_to(stream, LONGEST_OPENING)?;
        let reason = match serde_json::from_str::<Opening>(&hello.opening) {
            _ if hello.proof != self.proof("keeper", [&nonce, &hello.nonce], &hello.opening) => {
                "the secrets differ; set OTTAVA_SECRET to the same text on all hosts"
            }
            Ok(opening) if opening.identity == self.identity => {
                let proof = self.proof("server", [&hello.nonce, &nonce], "");
                send(stream, &Answer::Accepted { proof })?;
                prepare(stream, silence)?;
                return Ok(opening);
            }
            _ => "the programs or their settings differ; start the same program with the same settings on all hosts",
        };
        send(stream, &Answer::Refused { reason: reason.into() })?;
        Err(refused(reason))
    }
}

/// The maximum length of the first message of a keeper, with the listing of a snapshot.
const LONGEST_OPENING: usize = 16 << 20;

fn refused(reason: &str) -> io::Error {
    io::Error::new(ErrorKind::PermissionDenied, reason.to_string())
}

/// Sets the time limits of reads and writes.
pub(super) fn prepare(stream: &TcpStream, limit: Duration) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(limit))?;
    stream.set_write_timeout(Some(limit))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// Connects a keeper with `theirs` to a keeper with `ours`. Returns what both sides get.
    fn meet(ours: &Credentials, theirs: &Credentials) -> (io::Result<HostId>, io::Result<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let limit = Duration::from_secs(5);
        std::thread::scope(|scope| {
            let accepted = scope.spawn(|| {
                let (mut stream, _) = listener.accept().unwrap();
                ours.accept(&mut stream, limit).map(|opening| opening.host)
            });
            let purpose = Purpose::Follow { port: 1, ranks_port: 2, name: "n".into() };
            let connected = theirs.connect(&address, 7, purpose, limit).map(drop);
            (accepted.join().unwrap(), connected)
        })
    }

    #[test]
    fn keepers_of_another_secret_or_program_are_refused() {
        let of = |secret: &str, identity: &str| Credentials { secret: secret.into(), identity: identity.into() };
        let (host, connected) = meet(&of("a", "1"), &of("a", "1"));
        assert_eq!((host.unwrap(), connected.is_ok()), (7, true));
        for (other, words) in [(of("b", "1"), "the secrets differ"), (of("a", "2"), "the programs or their settings")] {
            let (host, connected) = meet(&of("a", "1"), &other);
            assert!(host.is_err());
            assert!(connected.unwrap_err().to_string().contains(words));
        }
    }

    #[test]
    fn long_and_wrong_messages_are_refused_without_their_memory() {
        let announced = |length: u32, rest: &[u8]| [&length.to_le_bytes()[..], rest].concat();
        for bytes in
            [announced(u32::MAX, b""), announced(4, b"tru"), announced(4, b"null"), announced(3, b"{}}"), vec![1]]
        {
            assert!(receive::<Up>(&mut &bytes[..]).is_err(), "{bytes:?}");
        }
        let mut bytes = Vec::new();
        send(&mut bytes, &Up::Saved(3)).unwrap();
        assert!(matches!(receive(&mut &bytes[..]).unwrap(), Up::Saved(3)));
    }
}
