//! The bodies of messages: the encoding of hellos, calls and faults.

use super::frame::{Fields, put_text};
use crate::comm::call::Call;
use crate::comm::fault::Fault;
use std::time::Duration;

/// The identity that a rank sends to rank 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub rank: usize,
    pub size: usize,
    /// The process, for example "pid 4242 on host x".
    pub process: String,
    pub identity: Vec<(String, String)>,
}

impl Hello {
    pub fn encode(&self) -> Vec<u8> {
        let mut body = Vec::new();
        for number in [self.rank, self.size, self.identity.len()] {
            body.extend((number as u64).to_le_bytes());
        }
        put_text(&mut body, &self.process);
        for (name, value) in &self.identity {
            put_text(&mut body, name);
            put_text(&mut body, value);
        }
        body
    }

    pub fn decode(body: &[u8]) -> Option<Hello> {
        let mut fields = Fields(body);
        let (rank, size, entries) = (fields.index()?, fields.index()?, fields.index()?);
        let process = fields.text()?;
        let mut identity = Vec::new();
        for _ in 0..entries {
            identity.push((fields.text()?, fields.text()?));
        }
        fields.0.is_empty().then_some(Hello { rank, size, process, identity })
    }
}

/// A call in the form in which a rank sends it to rank 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CallHead {
    /// The number that identifies the answer.
    pub request: u64,
    /// The number of the group.
    pub group: u64,
    /// The number of the call in its channel.
    pub number: u64,
    pub call: Call,
}

/// Encodes the head of a call's message, which precedes the data: the numbers, and the call as JSON.
pub(super) fn encode_call(CallHead { request, group, number, call }: &CallHead) -> Vec<u8> {
    let mut body: Vec<u8> = [request, group, number].into_iter().flat_map(|number| number.to_le_bytes()).collect();
    put_text(&mut body, &serde_json::to_string(call).expect("a call has no map, so JSON can write it"));
    body
}

/// Decodes the head of a call's message, and returns it with the data.
pub(super) fn decode_call(body: &[u8]) -> Option<(CallHead, Vec<u8>)> {
    let mut fields = Fields(body);
    let (request, group, number) = (fields.number()?, fields.number()?, fields.number()?);
    let call = serde_json::from_str(&fields.text()?).ok()?;
    Some((CallHead { request, group, number, call }, fields.0.to_vec()))
}

pub(super) fn encode_fault(fault: &Fault) -> Vec<u8> {
    let mut body = Vec::new();
    match fault {
        Fault::Desync(message) => {
            body.push(0);
            put_text(&mut body, message);
        }
        Fault::Lost { rank, process, silent, details } => {
            body.push(if silent.is_some() { 2 } else { 1 });
            body.extend((*rank as u64).to_le_bytes());
            body.extend((silent.unwrap_or_default().as_millis() as u64).to_le_bytes());
            put_text(&mut body, process);
            put_text(&mut body, details.as_deref().unwrap_or_default());
        }
        Fault::Late(message) => {
            body.push(3);
            put_text(&mut body, message);
        }
    }
    body
}

pub(super) fn decode_fault(body: &[u8]) -> Option<Fault> {
    let mut fields = Fields(body);
    match fields.byte()? {
        0 => fields.text().map(Fault::Desync),
        how @ (1 | 2) => {
            let (rank, limit, process) = (fields.index()?, fields.number()?, fields.text()?);
            let details = fields.text().filter(|details| !details.is_empty());
            Some(Fault::Lost { rank, process, silent: (how == 2).then(|| Duration::from_millis(limit)), details })
        }
        3 => fields.text().map(Fault::Late),
        _ => None,
    }
}
