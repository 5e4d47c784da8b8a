// A ROS 2 peer that shares no code with the project: Fast DDS, the default middleware of ROS 2, bare.
//
//   fastdds_peer echo DOMAIN            rt/joint_states -> rt/pong, message by message
//   fastdds_peer client DOMAIN SERVICE  calls a std_srvs/srv/Trigger once a second, as rmw_fastrtps does
//   fastdds_peer server DOMAIN SERVICE  serves a std_srvs/srv/Trigger, as rmw_fastrtps does
//
// It talks on 127.0.0.1 alone, without multicast, says on standard output what it does, one line
// each, and ends when standard input does.

#include <poll.h>
#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>

#include <fastdds/dds/domain/DomainParticipant.hpp>
#include <fastdds/dds/domain/DomainParticipantFactory.hpp>
#include <fastdds/dds/publisher/DataWriter.hpp>
#include <fastdds/dds/publisher/Publisher.hpp>
#include <fastdds/dds/subscriber/DataReader.hpp>
#include <fastdds/dds/subscriber/SampleInfo.hpp>
#include <fastdds/dds/subscriber/Subscriber.hpp>
#include <fastdds/dds/topic/TypeSupport.hpp>
#include <fastdds/rtps/transport/UDPv4TransportDescriptor.h>
#include <fastrtps/utils/IPLocator.h>

#include "ros_typesPubSubTypes.h"

using namespace eprosima::fastdds::dds;
using eprosima::fastdds::rtps::UDPv4TransportDescriptor;
using eprosima::fastrtps::rtps::GUID_t;
using eprosima::fastrtps::rtps::IPLocator;
using eprosima::fastrtps::rtps::Locator_t;
using eprosima::fastrtps::rtps::SampleIdentity;
using eprosima::fastrtps::rtps::WriteParams;

using JointState = sensor_msgs::msg::dds_::JointState_PubSubType;
using TriggerRequest = std_srvs::srv::dds_::Trigger_Request_PubSubType;
using TriggerResponse = std_srvs::srv::dds_::Trigger_Response_PubSubType;

constexpr int kPeers = 32;  // participants of one host that are looked for, as rmw_cyclonedds does
const Duration_t kTick{0, 50'000'000};

void say(const std::string& line) { std::cout << line << std::endl; }

bool stdin_ended() {
    pollfd input{STDIN_FILENO, POLLIN, 0};
    if (poll(&input, 1, 0) <= 0) return false;
    char octet;
    return read(STDIN_FILENO, &octet, 1) <= 0;
}

template <typename T>
T* made(T* entity, const char* what) {
    if (entity == nullptr) throw std::runtime_error(std::string("cannot make ") + what);
    return entity;
}

class Peer {
public:
    explicit Peer(int domain) {
        DomainParticipantQos qos;
        auto transport = std::make_shared<UDPv4TransportDescriptor>();
        qos.transport().use_builtin_transports = false;
        qos.transport().user_transports.push_back(transport);
        auto& builtin = qos.wire_protocol().builtin;
        builtin.metatrafficUnicastLocatorList.push_back(Locator_t());  // a list of one's own: no multicast
        for (int k = 0; k < kPeers; ++k) {
            builtin.initialPeersList.push_back(loopback(7410 + 250 * domain + 2 * k));
        }
        auto* factory = DomainParticipantFactory::get_instance();
        participant_ = made(factory->create_participant(domain, qos), "a participant");
        publisher_ = made(participant_->create_publisher(PUBLISHER_QOS_DEFAULT), "a publisher");
        subscriber_ = made(participant_->create_subscriber(SUBSCRIBER_QOS_DEFAULT), "a subscriber");
    }

    ~Peer() {
        participant_->delete_contained_entities();
        DomainParticipantFactory::get_instance()->delete_participant(participant_);
    }

    template <typename Type>
    DataWriter* writer(const std::string& topic) {
        DataWriterQos qos;
        qos.reliability().kind = RELIABLE_RELIABILITY_QOS;
        qos.history().depth = 10;
        qos.endpoint().history_memory_policy = eprosima::fastrtps::rtps::PREALLOCATED_WITH_REALLOC_MEMORY_MODE;
        return made(publisher_->create_datawriter(this->topic<Type>(topic), qos), "a writer");
    }

    template <typename Type>
    DataReader* reader(const std::string& topic) {
        DataReaderQos qos;
        qos.reliability().kind = RELIABLE_RELIABILITY_QOS;
        qos.history().depth = 10;
        qos.endpoint().history_memory_policy = eprosima::fastrtps::rtps::PREALLOCATED_WITH_REALLOC_MEMORY_MODE;
        return made(subscriber_->create_datareader(this->topic<Type>(topic), qos), "a reader");
    }

private:
    static Locator_t loopback(uint32_t port) {
        Locator_t locator;
        locator.kind = LOCATOR_KIND_UDPv4;
        IPLocator::setIPv4(locator, "127.0.0.1");
        locator.port = port;
        return locator;
    }

    template <typename Type>
    Topic* topic(const std::string& name) {
        TypeSupport type(new Type());
        type.register_type(participant_);
        return made(participant_->create_topic(name, type.get_type_name(), TOPIC_QOS_DEFAULT), "a topic");
    }

    DomainParticipant* participant_;
    Publisher* publisher_;
    Subscriber* subscriber_;
};

template <typename Message>
bool take(DataReader* reader, Message& message, SampleInfo& info) {
    return reader->take_next_sample(&message, &info) == ReturnCode_t::RETCODE_OK && info.valid_data;
}

bool is_matched(DataWriter* writer, DataReader* reader) {
    PublicationMatchedStatus out;
    SubscriptionMatchedStatus in;
    writer->get_publication_matched_status(out);
    reader->get_subscription_matched_status(in);
    return out.current_count > 0 && in.current_count > 0;
}

void echo(Peer& peer) {
    auto* pong = peer.writer<JointState>("rt/pong");
    auto* joint_states = peer.reader<JointState>("rt/joint_states");
    say("ready");
    while (!stdin_ended()) {
        joint_states->wait_for_unread_message(kTick);
        sensor_msgs::msg::dds_::JointState_ message;
        for (SampleInfo info; take(joint_states, message, info);) pong->write(&message);
    }
}

void serve(Peer& peer, const std::string& service) {
    auto* replies = peer.writer<TriggerResponse>("rr/" + service + "Reply");
    auto* requests = peer.reader<TriggerRequest>("rq/" + service + "Request");
    say("ready");
    while (!stdin_ended()) {
        requests->wait_for_unread_message(kTick);
        std_srvs::srv::dds_::Trigger_Request_ request;
        SampleInfo info;
        if (!is_matched(replies, requests) || !take(requests, request, info)) continue;
        // rmw_fastrtps: a request without the inline QoS is correlated by its writer.
        SampleIdentity asked = info.sample_identity;
        const GUID_t reader = info.related_sample_identity.writer_guid();
        if (reader != GUID_t::unknown()) asked.writer_guid(reader);
        std_srvs::srv::dds_::Trigger_Response_ response;
        response.success(true);
        response.message("served by Fast DDS");
        WriteParams params;
        params.related_sample_identity(asked);
        replies->write(&response, params);
        say("served");
    }
}

bool is_answered(DataReader* replies, const SampleIdentity& asked) {
    std_srvs::srv::dds_::Trigger_Response_ response;
    for (SampleInfo info; take(replies, response, info);) {
        // rmw_fastrtps: replies to others, and those that do not say to whom, are dropped.
        const auto& to = info.related_sample_identity;
        const bool is_ours = to.writer_guid() == replies->guid() || to.writer_guid() == asked.writer_guid();
        if (is_ours && to.sequence_number() == asked.sequence_number()) {
            say("reply " + response.message());
            return true;
        }
        say("dropped");
    }
    return false;
}

void call(Peer& peer, const std::string& service) {
    auto* requests = peer.writer<TriggerRequest>("rq/" + service + "Request");
    auto* replies = peer.reader<TriggerResponse>("rr/" + service + "Reply");
    say("ready");
    while (!stdin_ended()) {
        if (!is_matched(requests, replies)) {
            replies->wait_for_unread_message(kTick);
            continue;
        }
        std_srvs::srv::dds_::Trigger_Request_ request;
        WriteParams params;
        params.related_sample_identity().writer_guid(replies->guid());
        requests->write(&request, params);
        bool answered = false;
        for (int tick = 0; tick < 20 && !stdin_ended(); ++tick) {
            replies->wait_for_unread_message(kTick);
            answered = answered || is_answered(replies, params.sample_identity());
        }
        if (!answered) say("no reply");
    }
}

int main(int count, char** values) {
    const std::string mode = count > 2 ? values[1] : "";
    const std::string service = count > 3 ? values[3] : "";
    try {
        if (mode == "echo") {
            Peer peer(std::atoi(values[2]));
            echo(peer);
        } else if (mode == "client" && !service.empty()) {
            Peer peer(std::atoi(values[2]));
            call(peer, service);
        } else if (mode == "server" && !service.empty()) {
            Peer peer(std::atoi(values[2]));
            serve(peer, service);
        } else {
            std::cerr << "usage: fastdds_peer echo DOMAIN | (client|server) DOMAIN SERVICE" << std::endl;
            return 2;
        }
    } catch (const std::exception& error) {
        std::cerr << "fastdds_peer: " << error.what() << std::endl;
        return 1;
    }
    return 0;
}
