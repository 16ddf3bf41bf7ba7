//! The sockets at which a keeper listens: for other keepers, and for the workers of its host.

use super::events::Input;
use super::hub::{HubDoor, HubInput};
use super::memory::Memory;
use super::transfer::{Peers, serve};
use super::wire::{Contact, Purpose, send};
use super::worker_link::FromWorker;
use crate::message::ToPeer;
use std::io::{self, BufRead, BufReader};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc::Sender;
use std::thread;
use std::time::{Duration, Instant};

/// The time between looks for a hub that is about to start.
const LOOK: Duration = Duration::from_millis(20);

/// Accepts connections of keepers until the process ends. `door` leads to the hub, if it is in this process.
pub(super) fn serve_keepers(listener: TcpListener, peers: Peers, door: HubDoor) -> io::Result<()> {
    thread::Builder::new().name("keepers".into()).spawn(move || {
        for stream in listener.incoming().flatten() {
            let (peers, door) = (peers.clone(), door.clone());
            let _ = thread::Builder::new().name("keeper".into()).spawn(move || {
                if let Err(error) = answer(stream, &peers, &door) {
                    tracing::debug!("a connection of a keeper ended: {error}");
                }
            });
        }
    })?;
    Ok(())
}

fn answer(mut stream: TcpStream, peers: &Peers, door: &HubDoor) -> io::Result<()> {
    let opening = peers.credentials.accept(&mut stream, peers.silence)?;
    let host = opening.host;
    match opening.purpose {
        Purpose::Follow { port, ranks_port, name } => {
            let address = |port: u16| stream.peer_addr().map(|peer| (peer.ip(), port)).map(std::net::SocketAddr::from);
            let (address, ranks_address) = (address(port)?.to_string(), address(ranks_port)?.to_string());
            let contact = Contact { host, address, ranks_address, name };
            // After the loss of a hub, other keepers may be here before the new hub is.
            let deadline = Instant::now() + peers.silence;
            while !door.is_open() && Instant::now() < deadline {
                thread::sleep(LOOK);
            }
            door.send(HubInput::Joined { stream, contact });
            Ok(())
        }
        Purpose::Copy { epoch, stored, listing } => {
            // The older buffer of the place is freed before the bytes come.
            let _ = peers.inputs.send(Input::CopyBegun { epoch, place: stored.share.place });
            let received = peers.memory.receive(epoch, &stored, &listing, &mut BufReader::new(&mut stream));
            let outcome = received.as_ref().map(drop).map_err(ToString::to_string);
            send(&mut stream, &outcome)?;
            received?;
            let _ = peers.inputs.send(Input::FromPeer { host, message: ToPeer::Copy { epoch, stored } });
            Ok(())
        }
        Purpose::Copied { epoch, stored } => {
            let _ = peers.inputs.send(Input::FromPeer { host, message: ToPeer::Copied { epoch, stored } });
            Ok(())
        }
        Purpose::Fetch { stored } => serve(&peers.memory, &stored, &mut stream),
    }
}

/// Accepts connections of the workers of this host until the process ends.
pub(super) fn serve_workers(memory: &Memory, inputs: Sender<Input>) -> io::Result<()> {
    let listener = UnixListener::bind(memory.socket())?;
    thread::Builder::new().name("workers".into()).spawn(move || {
        for stream in listener.incoming().flatten() {
            let inputs = inputs.clone();
            let _ = thread::Builder::new().name("worker".into()).spawn(move || listen(stream, &inputs));
        }
    })?;
    Ok(())
}

/// Passes the messages of a worker on, until it ends.
fn listen(stream: UnixStream, inputs: &Sender<Input>) -> Option<()> {
    let mut lines = BufReader::new(stream.try_clone().ok()?).lines();
    let mut next = || serde_json::from_str::<FromWorker>(&lines.next()?.ok()?).ok();
    let FromWorker::Joined { epoch } = next()? else { return None };
    inputs.send(Input::WorkerJoined { epoch, stream }).ok()?;
    loop {
        inputs.send(Input::FromWorker { epoch, message: next()? }).ok()?;
    }
}
